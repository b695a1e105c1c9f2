from pathlib import Path

import pytest
from epd_orchestrator.template import ChatTemplate
from epd_scheduler.request import RefusedError
from transformers.utils.chat_template_utils import render_jinja_template

DIGITS = (Path(__file__).parents[2] / "models/digits-vl/chat_template.jinja").read_text()
TRICKY = """{% for m in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {{ bos_token }}{{ m['role'] | upper }}: {{ m | tojson }}
{% generation %}
  [{{ m['content'][0]['text'] | trim }}]
{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}go{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": ' Be <brief> & "exact" — 中 '}]},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
]


@pytest.mark.parametrize("source", [DIGITS, TRICKY])
def test_rendering_equals_transformers(source: str) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, **variables)
    assert ChatTemplate(source, variables).render(MESSAGES) == expected[0]


def test_a_template_that_refuses_says_so() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RefusedError, match="roles must alternate"):
        template.render(MESSAGES)


def test_a_template_cannot_reach_python() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}", {})
    with pytest.raises(RefusedError):
        template.render(MESSAGES)
