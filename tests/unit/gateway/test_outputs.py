"""Outputs of templates and of grammars: read the same however they are cut, and rendered back as the same text.

``scripts/outputs`` does this for a folder of real templates. These templates are written for this test.
"""

import random

import pytest

from tests.support.gateways.grammar_walks import byte_vocabulary
from tests.support.gateways.model_outputs import TURNS, Family, Output, Turn, tally

BEGIN = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}
{%- if m.role != 'assistant' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% else %}<|im_start|>assistant
{% if m.reasoning_content %}THINK{{ m.reasoning_content }}UNTHINK{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}"""
END = """{% endfor %}{{ 'AFTER' if m.tool_calls }}<|im_end|>
{% endif %}{% if m.role == 'tool' %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def template(call: str, *, before: str = "", after: str = "", think: str = "<think>", unthink: str = "</think>") -> str:
    """A template that writes each call so; ``before`` and ``after`` are around all calls of a turn."""
    begin = BEGIN.replace("UNTHINK", unthink).replace("THINK", think)
    opened = "{% if loop.first %}" + before + "{% endif %}" if before else ""
    return begin + opened + call + END.replace("AFTER", after)


VALUE = "{{ value if value is string else value | tojson }}"
TEMPLATES = {
    "hermes": template(
        """{{ '\\n' }}<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>"""
    ),
    "qwen-coder": template(
        "{{ '\\n' }}<tool_call>\n<function={{ f.name }}>{{ '\\n' }}{% for key, value in f.arguments | items %}"
        f"<parameter={{{{ key }}}}>\n{VALUE}{{{{ '\\n' }}}}</parameter>{{{{ '\\n' }}}}{{% endfor %}}"
        "</function>\n</tool_call>"
    ),
    "seed": template(
        "{{ '\\n' }}<seed:tool_call>\n<function={{ f.name }}>{{ '\\n' }}{% for key, value in f.arguments | items %}"
        f"<parameter={{{{ key }}}}>{VALUE}</parameter>{{{{ '\\n' }}}}{{% endfor %}}"
        "</function>\n</seed:tool_call>",
        think="<seed:think>",
        unthink="</seed:think>",
    ),
    "glm": template(
        "<tool_call>{{ f.name }}{% for key, value in f.arguments | items %}<arg_key>{{ key }}</arg_key>"
        f"<arg_value>{VALUE}</arg_value>{{% endfor %}}</tool_call>"
    ),
    "kimi": template(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "deepseek-v4": template(
        '<｜DSML｜invoke name="{{ f.name }}">{{ "\\n" }}{% for key, value in f.arguments | items %}'
        "<｜DSML｜parameter name=\"{{ key }}\" string=\"{{ 'true' if value is string else 'false' }}\">"
        f"{VALUE}</｜DSML｜parameter>{{{{ '\\n' }}}}{{% else %}}{{{{ '\\n' }}}}{{% endfor %}}"
        "</｜DSML｜invoke>{{ '\\n' }}",
        before="{{ '\\n\\n' }}<｜DSML｜tool_calls>{{ '\\n' }}",
        after="</｜DSML｜tool_calls>",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_outputs_are_read_however_they_are_cut_and_come_back_as_they_were(name: str) -> None:
    family = Family(TEMPLATES[name])
    assert family.chat.name == name
    counts = await tally(family, byte_vocabulary(), num_random=4, seed=f"short {name}")
    assert counts.faults == []
    assert counts.written == counts.meant == len(TURNS)
    assert counts.cut_alike == counts.same == counts.outputs
    assert counts.random > 0


async def test_random_outputs_differ_and_are_the_same_again() -> None:
    family = Family(TEMPLATES["hermes"])
    texts = [await family.walked(random.Random(seed), byte_vocabulary()) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_a_list_in_python_is_read_as_a_list() -> None:
    call = "<function=list-all>\n<parameter=flags>[True, False]</parameter>\n</function>"
    found = Family(TEMPLATES["seed"]).read(Output(text=f"<seed:tool_call>\n{call}\n</seed:tool_call>"), 5)
    assert found == Turn(calls=[("list-all", {"flags": [True, False]})])
