{{- define "splitpoint.labels" -}}
app.kubernetes.io/name: splitpoint
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* What a Service or a controller picks pods by: (list . "kvstore"). */ -}}
{{- define "splitpoint.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: splitpoint
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "splitpoint.pod" -}}
runAsNonRoot: true
runAsUser: {{ .Values.uid }}
runAsGroup: {{ .Values.uid }}
fsGroup: {{ .Values.uid }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "splitpoint.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "splitpoint.model" -}}
{{- if .Values.model.claim -}}
/model{{ with .Values.model.path }}/{{ . }}{{ end }}
{{- else -}}
/models/stdlib-llama
{{- end -}}
{{- end }}

{{- define "splitpoint.redis" -}}
{{- .Values.redis.url | default (printf "redis://splitpoint@%s-redis:6379/0" .Release.Name) -}}
{{- end }}

{{- /* On each node: the folder of the arena, the same path in every container. */ -}}
{{- define "splitpoint.arena" -}}
/dev/shm/splitpoint-{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end }}

{{- /* Where the node's folder of the disk tier is mounted. */ -}}
{{- define "splitpoint.tier" -}}
/var/lib/splitpoint-tier
{{- end }}

{{- define "splitpoint.storeImage" -}}
{{- if .Values.mooncake.enabled }}{{ .Values.mooncake.image }}{{ else }}{{ .Values.image.control }}{{ end -}}
{{- end }}

{{- /* Arguments of the store about tiers and transfers. */ -}}
{{- define "splitpoint.tiers" -}}
{{- with .Values.kvstore.tierDisk }}
{{- if .folder }}
- --tier-disk={{ include "splitpoint.tier" $ }}
- --tier-disk-size={{ .size }}
{{- end }}
{{- if or .folder $.Values.mooncake.enabled }}
- --tier-admission={{ .admission }}
{{- end }}
{{- end }}
{{- with .Values.mooncake }}
{{- if .enabled }}
- --transfer-interface={{ .interface }}
- --trusted-network
{{- if .transfer }}
- --transfer=mooncake
{{- end }}
{{- if .pool.enabled }}
- --tier-mooncake={{ $.Release.Name }}-mooncake-master:{{ .pool.port }}
- --tier-mooncake-memory={{ .pool.memory }}
- --tier-mooncake-replicas={{ .pool.replicas }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Arguments that store, workers and schedulers take. */ -}}
{{- define "splitpoint.arguments" -}}
- --model={{ include "splitpoint.model" . }}
- --dtype={{ .Values.model.dtype }}
- --tls-cert=/tls/tls.crt
- --tls-key=/tls/tls.key
- --tls-ca=/tls/ca.crt
- --tls-server-name={{ .Values.security.serverName }}
- --tokens=/access/tokens.toml
- --token-file=/access/services.token
- --redis={{ include "splitpoint.redis" . }}
- --redis-password-file=/redis/password
- --metrics=0.0.0.0:{{ .Values.metrics.port }}
- --metrics-open
{{- end }}

{{- /* For the probes, and for `kubectl exec ... -- splitpoint status`. */ -}}
{{- define "splitpoint.environment" -}}
- {name: SPLITPOINT_CA, value: /tls/ca.crt}
- {name: SPLITPOINT_CERT, value: /tls/tls.crt}
- {name: SPLITPOINT_KEY, value: /tls/tls.key}
- {name: SPLITPOINT_SERVER_NAME, value: {{ .Values.security.serverName }}}
- {name: SPLITPOINT_ADDRESS, value: "{{ .Release.Name }}-scheduler:{{ .Values.scheduler.port }}"}
- {name: HOME, value: /tmp}
{{- end }}

{{- define "splitpoint.mounts" -}}
- {name: tls, mountPath: /tls, readOnly: true}
- {name: access, mountPath: /access, readOnly: true}
- {name: redis, mountPath: /redis, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.model.claim }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}

{{- /* How pods of a component are spread: (list . "worker" constraints). */ -}}
{{- define "splitpoint.spread" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
topologySpreadConstraints:
{{- range index . 2 }}
  - maxSkew: {{ .maxSkew }}
    topologyKey: {{ .topologyKey }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "splitpoint.selector" (list $root $component) | nindent 8 }}
{{- end }}
{{- end }}

{{- /* Secrets are root's and the group's: services take them so (docs/security.md). */ -}}
{{- define "splitpoint.volumes" -}}
- name: tls
  secret: {secretName: {{ .Values.security.tlsSecret }}, defaultMode: 288}
- name: access
  secret: {secretName: {{ .Values.security.accessSecret }}, defaultMode: 288}
- name: redis
  secret: {secretName: {{ .Values.redis.passwordSecret }}, defaultMode: 288}
- name: tmp
  emptyDir: {}
{{- with .Values.model.claim }}
- name: model
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{- /* A probe by the gRPC health service: (list . port service seconds failures). Kubernetes' own
gRPC probes speak no TLS, so it is a command. */ -}}
{{- define "splitpoint.probe" -}}
exec:
  command: [python, -m, splitpoint_cli.request.probe, "127.0.0.1:{{ index . 1 }}", --service, "{{ index . 2 }}", --timeout, "4"]
periodSeconds: {{ index . 3 }}
failureThreshold: {{ index . 4 }}
timeoutSeconds: 8
{{- end }}

{{- /* A probe of the gateway: (list . port path seconds failures). By a GET of the kubelet, which
verifies no certificate. */ -}}
{{- define "splitpoint.httpProbe" -}}
httpGet: {path: {{ index . 2 }}, port: {{ index . 1 }}, scheme: HTTPS}
periodSeconds: {{ index . 3 }}
failureThreshold: {{ index . 4 }}
timeoutSeconds: 8
{{- end }}
