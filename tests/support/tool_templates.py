"""Chat templates that write tools, in the forms of the common families; written for the tests."""

HERMES = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for message in messages %}"
    "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}<|assistant|>\n"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}\n'
    "{% elif message.role == 'tool' %}<|ipython|>\n{{ message.content }}\n"
    "{% else %}<|{{ message.role }}|>\n"
    "{% if tools and loop.index0 == 0 %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% endif %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_MISTRAL = (
    "{%% for message in messages %%}"
    "{%% if message.tool_calls %%}%s"
    "{%% elif message.role == 'tool' %%}{%% if message.tool_call_id | length != 9 %%}"
    "{{ raise_exception('ids have nine characters') }}{%% endif %%}"
    "[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{%% elif message.role == 'user' %%}"
    "{%% if tools %%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%% endif %%}"
    "[INST]{{ message.content }}[/INST]"
    "{%% else %%}{{ message.content }}{%% endif %%}{%% endfor %%}"
)
MISTRAL = _MISTRAL % (
    "[TOOL_CALLS] [{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]'
)
MISTRAL_NAMED = _MISTRAL % (
    "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}"
)
# Tools it knows, but calls in a form that is no other's.
XML = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<function={{ call.function.name }}>{% endfor %}\n"
    "{% endfor %}"
)
