"""Chat templates that behave as those of released models do, written for these tests; none is a copy."""

from __future__ import annotations

# ChatML with the turn's end and a generation prompt, no tags: Qwen2's behaviour.
CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# The same, but it ignores add_generation_prompt.
CHATML_NO_PROMPT = CHATML.split("{%- if add_generation_prompt")[0]

CHATML_TAGGED = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' -%}
{%- generation -%}{{ m.content + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Qwen3: thoughts are dropped from turns before the last question; the last answer always has a think block,
# an empty one if need be; the prompt has an empty block only when thinking is switched off; tool results are
# joined in a user's turn.
QWEN3 = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\\n\\n' }}{%- endif -%}
{{ '# Tools\\n<tools>' }}{%- for t in tools -%}{{ '\\n' + (t | tojson) }}{%- endfor -%}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif -%}
{%- set ns = namespace(open=true, last=messages|length - 1) -%}
{%- for m in messages[::-1] -%}
{%- set i = messages|length - 1 - loop.index0 -%}
{%- if ns.open and m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) -%}
{%- set ns.open = false -%}{%- set ns.last = i -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- set text = m.content if m.content is string else '' -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{%- set thought = '' -%}
{%- if m.reasoning_content is string -%}
{%- set thought = m.reasoning_content -%}
{%- elif '</think>' in text -%}
{%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{ '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}
{%- else -%}
{{ '<|im_start|>assistant\\n' + text }}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if (loop.first and text) or not loop.first -%}{{ '\\n' }}{%- endif -%}
{%- set f = call.function or call -%}
{{ '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
{%- if f.arguments is string -%}{{ f.arguments }}{%- else -%}{{ f.arguments | tojson }}{%- endif -%}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
"""

# Qwen3.5: contents are trimmed, every answer after the last question has a think block, and the prompt opens
# one.
QWEN35 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if ns.last < 0 -%}{{ raise_exception('No user query found in messages.') }}{%- endif -%}
{%- for m in messages -%}
{%- set text = m.content | trim -%}
{%- if m.role == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}
{{ '<|im_start|>system\\n' + text + '<|im_end|>\\n' }}
{%- elif m.role == 'user' -%}
{{ '<|im_start|>user\\n' + text + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{%- set thought = (m.reasoning_content if m.reasoning_content is string else '') | trim -%}
{%- if loop.index0 > ns.last -%}
{{ '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + text }}
{%- else -%}
{{ '<|im_start|>assistant\\n' + text }}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{ ('\\n\\n' if loop.first and text else '\\n' if not loop.first else '') + '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items -%}
{{ '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response><|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n') }}
{%- endif -%}
"""

# Llama 3: begins with bos, trims, a system turn of its own with a date, tool calls instead of content.
LLAMA3 = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{ '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + (date_string or strftime_now('%d %b %Y')) + '\\n\\n' + system + '<|eot_id|>' }}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role == 'tool' -%}
{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

# Mistral: no role words; roles must alternate; the system text moves into the last user's turn.
MISTRAL = """\
{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{{ bos_token }}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate user/assistant') }}{%- endif -%}
{%- if m.role == 'user' -%}
{{ '[INST] ' + (system if loop.revindex0 <= 1 else '') + m.content + ' [/INST]' }}
{%- else -%}{{ ' ' + m.content + eos_token }}{%- endif -%}
{%- endfor -%}
"""

# A template that looks into the text: answers that begin with "!" are shown differently.
PEEKING = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + ('(loud) ' + m.content[1:] if m.content.startswith('!') else m.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# And one that cannot be understood from outside: it turns the answer round.
REVERSING = CHATML.replace("m.content", "(m.content | reverse)")
