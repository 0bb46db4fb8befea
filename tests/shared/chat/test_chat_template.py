"""Chats become the prompts that transformers makes of them, for templates of every family's style.

The templates are written for these tests. They use what the published ones use: tests for roles,
loops with `loop`, `namespace`, macros, slices of messages, filters, tools and their calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from splitpoint.chat.messages import Chat, ChatError
from splitpoint.chat.source import ChatTemplates
from splitpoint.chat.template import ModelTemplates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# Qwen's style: ChatML, tools in Hermes' form, results of tools in user turns.
CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nReturn a call within <tool_call></tool_call> tags.\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" and message.content is string
          and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}
        {%- set ns.seen = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
                {{- call.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# Llama 2's and Mistral's style: roles must take turns, the system prompt is in the first one.
INSTRUCTIONS = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set system_message = messages[0]['content'] -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{{ bos_token }}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant must take turns') }}
    {%- endif -%}
    {%- if loop.index0 == 0 and system_message is defined -%}
        {%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' -%}
        {%- set content = content + message['content'] -%}
    {%- else -%}
        {%- set content = message['content'] -%}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{ '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + content.strip() + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""
# Mistral's tools: the JSON of each argument, ids of nine characters.
MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- if tools is not none and message == users[-1] -%}
            {{- '[AVAILABLE_TOOLS] [' -}}
            {%- for tool in tools -%}
                {%- set tool = tool.function -%}
                {{- '{"type": "function", "function": {' -}}
                {%- for key, val in tool.items() if key != 'return' -%}
                    {%- if val is string -%}{{- '"' ~ key ~ '": "' ~ val ~ '"' -}}
                    {%- else -%}{{- '"' ~ key ~ '": ' ~ val | tojson -}}{%- endif -%}
                    {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
                {%- endfor -%}
                {{- '}}' -}}
                {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
            {%- endfor -%}
            {{- '][/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST] ' ~ message.content ~ '[/INST]' -}}
    {%- elif message.tool_calls is defined and message.tool_calls is not none -%}
        {{- '[TOOL_CALLS] [' -}}
        {%- for call in message.tool_calls -%}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
            {%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
        {%- endfor -%}
        {{- ']' ~ eos_token -}}
    {%- elif message.role == 'assistant' -%}
        {{- ' ' ~ message.content ~ eos_token -}}
    {%- elif message.role == 'tool' -%}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content | tojson ~ '}[/TOOL_RESULTS]' -}}
    {%- endif -%}
{%- endfor -%}
"""
# Llama 3's style: trimmed contents, a date, tools in the first user turn.
HEADERS = """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|python_tag|>{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson(indent=4) }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# Gemma's style: no system role, "model" for the assistant, contents as texts or as parts.
PARTS = """
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
# Lines of blocks leave no white space; a loop is left early; training marks; macros.
LINES = """{% macro turn(role, text) %}
<{{ role }}>{{ text }}</{{ role }}>
{% endmacro %}
{% for message in messages %}
  {% if message.role == 'stop' %}
    {% break %}
  {% elif message.role == 'skip' %}
    {% continue %}
  {% endif %}
  {% if message.role == 'assistant' %}
    {% generation %}
{{ turn(message.role, message.content) }}
    {% endgeneration %}
  {% else %}
{{ turn(message.role, message.content | default('none', true)) -}}
  {% endif %}
{% endfor %}
{{ documents | default([], true) | length }} {{ eos_token }} {{ nothing }}
"""
TEMPLATES = {
    "chatml": CHATML,
    "instructions": INSTRUCTIONS,
    "mistral": MISTRAL,
    "headers": HEADERS,
    "parts": PARTS,
    "lines": LINES,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wie ist das Wetter in <Ort>? \"é\" & '你好'",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
TEXTS = ["hello", " spaces around \n", "", "naïve 你好 😀", "a\nb\n\nc", "<|im_end|>{{ 1 }}", '"q"']


def called(*names: str) -> dict[str, Any]:
    calls = [
        {
            "id": f"call{n:05}",
            "type": "function",
            "function": {"name": name, "arguments": {"place": "Köln", "n": n}},
        }
        for n, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def conversations() -> list[list[dict[str, Any]]]:
    draw = random.Random(7)

    def text() -> str:
        return draw.choice(TEXTS) + draw.choice(TEXTS)

    found: list[list[dict[str, Any]]] = []
    for _ in range(40):
        chat = [{"role": "system", "content": text()}] if draw.random() < 0.5 else []
        for _ in range(draw.randrange(1, 5)):
            chat.append({"role": "user", "content": text()})
            kind = draw.random()
            if kind < 0.3:
                chat.append(called(*["weather", "now"][: draw.randrange(1, 3)]))
                chat += [{"role": "tool", "content": text(), "name": "weather"}]
                chat.append({"role": "assistant", "content": text()})
            else:
                chat.append({"role": "assistant", "content": text()})
                if kind < 0.5:
                    chat[-1]["reasoning_content"] = "\nbecause " + text()
        if draw.random() < 0.6:
            chat.pop()
        found.append(chat)
    found.append([{"role": "assistant", "content": "alone"}])
    found.append([{"role": "user", "content": "x"}, {"role": "stop", "content": "y"}])
    found.append([{"role": "skip", "content": "x"}, {"role": "user", "content": "y"}])
    return found


def ours(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] = (),
    arguments: Mapping[str, Any] | None = None,
    **flags: bool,
) -> str:
    chat = Chat(
        json.dumps(messages),
        json.dumps(tools) if tools else "",
        json.dumps(arguments) if arguments else "",
        **flags,
    )
    return ModelTemplates(template, None, TOKENS).render(chat)


def theirs(template: str, messages: Any, tools: Any = None, **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        **TOKENS,
    )
    return str(
        tokenizer.apply_chat_template(
            messages, tools or None, chat_template=template, tokenize=False, **options
        )
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_become_what_transformers_makes_of_them(name: str) -> None:
    template, refused, equal = TEMPLATES[name], 0, 0
    for number, chat in enumerate(conversations()):
        tools = TOOLS if number % 3 == 0 else []
        arguments = {"enable_thinking": False, "date_string": "heute"} if number % 4 == 1 else {}
        adds = number % 2 == 0
        try:
            expected = theirs(template, chat, tools, add_generation_prompt=adds, **arguments)
        except Exception:
            refused += 1
            with pytest.raises(ChatError):
                ours(template, chat, tools, arguments, adds_generation_prompt=adds)
            continue
        equal += 1
        assert ours(template, chat, tools, arguments, adds_generation_prompt=adds) == expected
    # Some templates refuse some of these chats; none refuses all, and each is compared often.
    assert equal > 15
    assert (refused > 0) == (name in ("instructions", "headers"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ["so far", "so far ", "so\nfar\n\n", " so"])
def test_a_last_message_goes_on_as_in_transformers(name: str, text: str) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    expected = theirs(TEMPLATES[name], chat, continue_final_message=True)
    assert ours(TEMPLATES[name], chat, continues_final_message=True) == expected
    assert expected.rstrip().endswith(text.strip())


def test_parts_reach_templates_that_go_through_them() -> None:
    """Others get their texts, joined by newlines."""
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]
    chat: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    assert ours(PARTS, chat) == theirs(PARTS, chat, add_generation_prompt=True)
    joined = [{"role": "user", "content": " one \ntwo"}]
    assert ours(CHATML, chat) == theirs(CHATML, joined, add_generation_prompt=True)
    only_parts = (
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    assert ours(only_parts, chat + joined) == "[ one ][two][ one \ntwo]"


def test_arguments_of_calls_may_be_json_texts() -> None:
    """OpenAI's form. A template prints objects."""
    text = json.loads(json.dumps(called("weather", "now")))
    for call in text["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    chat = [{"role": "user", "content": "x"}]
    for template in (CHATML, MISTRAL):
        assert ours(template, [*chat, text]) == ours(template, [*chat, called("weather", "now")])
    empty = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    assert '"arguments": {}' in ours(CHATML, [*chat, empty])


def test_null_contents_are_empty_unless_the_template_knows_calls() -> None:
    plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    null = {"role": "assistant", "content": None}
    with_calls = {**called("weather"), "content": None}
    assert ours(plain, [null, with_calls]) == "[][]"
    knows = "{% for m in messages %}{{ m.content is none }} {{ m.tool_calls|length }};{% endfor %}"
    assert ours(knows, [null, with_calls]) == "False 0;True 1;"


def test_reasoning_has_the_name_that_templates_read() -> None:
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    for name in ("reasoning", "reasoning_content", "thinking"):
        chat = [{"role": "assistant", "content": "x", name: "why"}]
        assert ours(template, chat) == theirs(template, chat) == "why|why"


def test_chats_with_tools_have_a_template_of_their_own() -> None:
    models_templates = ModelTemplates("plain", "tools: {{ tools | length }}", {})
    messages = '[{"role": "user", "content": "x"}]'
    assert models_templates.render(Chat(messages)) == "plain"
    assert models_templates.render(Chat(messages, tools="[]")) == "plain"
    assert models_templates.render(Chat(messages, tools='[{"type": "function"}]')) == "tools: 1"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "hermes"),
        (MISTRAL, "mistral"),
        (HEADERS, "llama3_json"),
        ('Answer {"name": function name, "parameters": {}}', "llama3_json"),
        (PARTS, ""),
        (INSTRUCTIONS, ""),
    ],
)
def test_the_form_of_tool_calls_is_told_from_the_template(template: str, expected: str) -> None:
    assert ChatTemplates(template).tool_call_format == expected
    assert ChatTemplates("plain", template).tool_call_format == expected


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (Chat(""), "messages"),
        (Chat("{"), "messages"),
        (Chat("{}"), "messages"),
        (Chat("[]"), "messages"),
        (Chat("[" * 100_000), "messages"),
        (Chat(json.dumps([USER] * 4097)), "messages"),
        (Chat('[{"role": "user", "content": NaN}]'), "messages"),
        (Chat(json.dumps([USER, 1])), "messages[1]"),
        (Chat(json.dumps([{"content": "x"}])), "messages[0].role"),
        (Chat(json.dumps([{"role": 1}])), "messages[0].role"),
        (Chat(json.dumps([{"role": "user", "content": 1}])), "messages[0].content"),
        (Chat(json.dumps([{"role": "user", "content": ["x"]}])), "messages[0].content[0]"),
        (
            Chat(json.dumps([{"role": "user", "content": [{"type": "image_url"}]}])),
            "messages[0].content[0].type",
        ),
        (
            Chat(json.dumps([{"role": "user", "content": [{"type": "text"}]}])),
            "messages[0].content[0].text",
        ),
        (Chat(json.dumps([{"role": "a", "tool_calls": {}}])), "messages[0].tool_calls"),
        (
            Chat(json.dumps([{"role": "a", "tool_calls": [{"function": {}}]}])),
            "messages[0].tool_calls[0].function",
        ),
        (
            Chat(
                json.dumps(
                    [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]
                )
            ),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (Chat(json.dumps([USER]), tools="{}"), "tools"),
        (Chat(json.dumps([USER]), tools="[1]"), "tools[0]"),
        (Chat(json.dumps([USER]), template_arguments="[]"), "template_arguments"),
        (
            Chat(json.dumps([USER]), template_arguments='{"messages": []}'),
            "template_arguments.messages",
        ),
        (Chat(json.dumps([USER]), continues_final_message=True), "messages[0].role"),
        (
            Chat('[{"role": "assistant", "content": ""}]', continues_final_message=True),
            "messages[0].content",
        ),
        (Chat('[{"role": "user", "content": "\\ud800"}]'), "messages"),
    ],
)
def test_a_bad_chat_names_its_field(chat: Chat, field: str) -> None:
    with pytest.raises(ChatError) as caught:
        ModelTemplates("{{ messages[0].content }}", None, {}).render(chat)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ 1 + }}", "{% nothing %}", "{{ x | nofilter }}"]
)
def test_a_broken_template_is_told_when_it_is_read(template: str) -> None:
    with pytest.raises(ChatError):
        ModelTemplates(template, None, {})
    with pytest.raises(ChatError):
        ModelTemplates("good", template, {})
