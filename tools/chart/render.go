// Renders the Helm chart where there is no helm: the same template language and functions
// (Go's text/template with sprig), without releases, hooks, lookups or dependencies.
//
//	GO111MODULE=off go run tools/chart/render.go CHART [VALUES...]
//
// Prints every manifest as `helm template splitpoint CHART -f VALUES...` does. Needs Debian's
// golang-go, golang-github-masterminds-sprig-dev and golang-github-ghodss-yaml-dev, with
// GOPATH=/usr/share/gocode.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
)

// files is the chart's folder, as templates see it.
type files string

// Get is the text of one file; links lead where they lead.
func (folder files) Get(name string) string {
	text, err := os.ReadFile(filepath.Join(string(folder), name))
	fail(err)
	return string(text)
}

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("usage: render CHART [VALUES...]"))
	}
	folder := os.Args[1]
	values := read(filepath.Join(folder, "values.yaml"))
	for _, path := range os.Args[2:] {
		merge(values, read(path))
	}
	about := read(filepath.Join(folder, "Chart.yaml"))
	data := map[string]interface{}{
		"Values":  values,
		"Files":   files(folder),
		"Release": map[string]interface{}{"Name": "splitpoint", "Namespace": "default", "Service": "Helm"},
		"Chart":   map[string]interface{}{"Name": about["name"], "Version": about["version"], "AppVersion": about["appVersion"]},
	}
	files, err := filepath.Glob(filepath.Join(folder, "templates", "*"))
	fail(err)
	sort.Strings(files)
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(sprig.TxtFuncMap()).Funcs(template.FuncMap{
		"include": func(name string, of interface{}) (string, error) {
			var text bytes.Buffer
			err := all.ExecuteTemplate(&text, name, of)
			return text.String(), err
		},
		"toYaml": func(of interface{}) (string, error) {
			text, err := yaml.Marshal(of)
			return strings.TrimSuffix(string(text), "\n"), err
		},
	})
	for _, path := range files {
		text, err := os.ReadFile(path)
		fail(err)
		_, err = all.New(filepath.Base(path)).Parse(string(text))
		fail(err)
	}
	for _, path := range files {
		name := filepath.Base(path)
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		var text bytes.Buffer
		fail(all.ExecuteTemplate(&text, name, data))
		for _, document := range strings.Split("\n"+text.String(), "\n---") {
			if strings.TrimSpace(document) != "" {
				fmt.Printf("---\n# Source: splitpoint/templates/%s\n%s\n", name, strings.Trim(document, "\n"))
			}
		}
	}
}

func read(path string) map[string]interface{} {
	text, err := os.ReadFile(path)
	fail(err)
	found := map[string]interface{}{}
	fail(yaml.Unmarshal(text, &found))
	return found
}

// merge lays `over` on `under`, map by map; anything else replaces.
func merge(under, over map[string]interface{}) {
	for key, value := range over {
		inner, isMap := value.(map[string]interface{})
		below, wasMap := under[key].(map[string]interface{})
		if isMap && wasMap {
			merge(below, inner)
		} else {
			under[key] = value
		}
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}
