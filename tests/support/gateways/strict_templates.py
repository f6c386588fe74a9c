"""Chat templates that each refuse or lose something, written for tests."""

from __future__ import annotations

NEEDS_USER = """{%- if reasoning_effort is defined and reasoning_effort not in ('low', 'medium', 'xhigh') %}
{{- raise_exception('no such effort') }}{% endif %}
{%- if not messages | selectattr('role', 'equalto', 'user') | list %}
{{- raise_exception('a user is needed') }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('only the first turn may be a system') }}{% endif %}
{%- if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('an unknown role') }}{% endif %}
{{- '<' + m.role + '>' + (m.content or '') }}{% for c in m.tool_calls or [] %}[call {{ c.function.name }}
{%- for k, v in c.function.arguments|items %} {{ k }}={{ v }}{% endfor %}]{% endfor %}
{%- endfor %}{% if tools %}{{ tools|tojson }}{% endif %}<assistant effort={{ reasoning_effort|default('xhigh') }}>"""

ONE_CALL = """{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls|length != 1 %}{{ raise_exception('one call in a turn') }}{% endif -%}
{%- set called = m.tool_calls[0].function -%}
<assistant>{"name": "{{ called.name }}", "parameters": {{ called.arguments|tojson }}}
{%- elif m.role == 'tool' -%}<tool>{{ m.content|tojson }}
{%- else -%}<{{ m.role }}>{{ m.content }}{% endif %}
{%- endfor %}{% if tools %}{{ tools|tojson }}{% endif %}<assistant>"""

ALTERNATES = """{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}
{%- endif %}<{{ m.role }}>{{ m.content|trim }}{% endfor %}<assistant>"""

NULL_CONTENT = """{%- for m in messages %}
{%- if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}
{{- '<assistant>[call ' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}
{%- elif m.role == 'assistant' %}<assistant>{{ m.content }}<end>
{%- elif m.role == 'tool' %}<tool>{{ m.content }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}
{%- endfor %}<assistant>"""

SHORT_IDS = """{%- set turns = namespace(count=0) %}{% set first = messages[0].role == 'system' %}
{%- for m in (messages[1:] if first else messages) %}
{%- if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (turns.count % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}
{%- set turns.count = turns.count + 1 %}{% endif %}
{%- if m.role == 'user' %}[INST]{{ messages[0].content + '\\n' if first and loop.last }}{{ m.content }}[/INST]
{%- elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif -%}
[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments|tojson }}{% endfor %}
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('an unknown role') }}{% endif %}{% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}"""

OBJECTS = """{%- for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{
{%- for k, v in c.function.arguments|dictsort %}{{ k }}:{{ v }}{% endfor %}}<tool_call|>{% endfor %}
{%- endfor %}{% if tools %}{{ tools|tojson }}{% endif %}<assistant>"""

PARTS = """{%- for m in messages %}<{{ m.role }}>{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}<assistant>"""

STRICT_TEMPLATES = {
    "needs user": NEEDS_USER,
    "one call": ONE_CALL,
    "alternates": ALTERNATES,
    "null content": NULL_CONTENT,
    "short ids": SHORT_IDS,
    "objects": OBJECTS,
    "parts": PARTS,
}
