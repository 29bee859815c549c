from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import templates as T
import torch
import typer

from dflash.commands import prepare as command
from dflash.config import DataConfig, load_config
from dflash.data import generators
from dflash.data.conversations import load_samples
from dflash.data.generators import Endpoint, TargetGenerator
from dflash.data.regenerate import Answer, ParallelGenerator, Prompt, Task, read_tasks, regenerate
from steptime.errors import UserError

USER, OLD = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "old"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


class Echo:
    """Answers with the number of messages it saw; counts prompts and can fail."""

    batch = 2

    def __init__(self, fail_at: int | None = None, answer: str = "seen {}", finished: bool = True) -> None:
        self.prompts: list[Prompt] = []
        self.fail_at, self.answer, self.finished = fail_at, answer, finished

    def __call__(self, prompts, done):
        for place, prompt in reversed(list(enumerate(prompts))):
            if len(self.prompts) == self.fail_at:
                raise UserError("planted")
            self.prompts.append(prompt)
            done(place, Answer(self.answer.format(len(prompt.messages)), self.finished))


def run(*arguments: object) -> int:
    app = typer.Typer()
    command.register(app)
    app.command("other")(lambda: None)
    return typer.main.get_command(app).main(["prepare", *map(str, arguments)], standalone_mode=False)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def tasks(jsonl, tmp_path):
    def make(*rows, **settings):
        return read_tasks(jsonl(*rows), settings.get("limit"), settings.get("skip_bad", False), tmp_path)[0]

    return make


# -- the walk through a conversation -------------------------------------------------------------------------


def test_every_answer_from_the_new_history(tasks, tmp_path):
    row = {"messages": [{"role": "system", "content": "s"}, USER, OLD, USER, OLD]}
    echo = Echo()
    regenerate(tasks(row), echo, tmp_path / "out.jsonl", {})
    assert [message["content"] for message in rows_of(tmp_path / "out.jsonl")[0]["conversations"]] == [
        "s",
        "Hi?",
        "seen 2",
        "Hi?",
        "seen 4",
    ]
    assert echo.prompts[1].messages[2]["content"] == "seen 2"


def test_tool_calls_stay(tasks, tmp_path):
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    row = {"messages": [USER, calling, {"role": "tool", "content": "x"}, OLD], "tools": [{"name": "f"}]}
    regenerate(tasks(row), Echo(), tmp_path / "out.jsonl", {})
    (result,) = rows_of(tmp_path / "out.jsonl")
    assert result["conversations"][1]["tool_calls"] == [CALL]
    assert result["conversations"][3]["content"] == "seen 3"
    assert result["tools"] == [{"name": "f"}]


def test_thoughts_are_split_off_and_cut_answers_marked(tasks, tmp_path):
    rows = [{"messages": [USER, OLD, USER, OLD]}] * 2
    report = regenerate(
        tasks(*rows), Echo(answer="<think>\nhm\n</think>\n\nyes", finished=False), tmp_path / "out.jsonl", {}
    )
    (result, _) = rows_of(tmp_path / "out.jsonl")
    assert result == {
        "conversations": [USER, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}],
        "finished": False,
    }
    assert (report.cut, report.written) == (2, 2)  # nothing follows a turn that was cut


def test_an_empty_thought_stays_in_the_answer(tasks, tmp_path):
    text = "<think>\n\n</think>\n\nyes"
    regenerate(tasks({"messages": [USER, OLD]}), Echo(answer=text), tmp_path / "out.jsonl", {})
    assert rows_of(tmp_path / "out.jsonl")[0]["conversations"][1]["content"] == text


@pytest.mark.parametrize(
    "text",
    ["half \ud83d", "", " ", "<think>\nnever ends", "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n"],
)
def test_no_answer_is_left_out_and_counted(tasks, tmp_path, text):
    class Half(Echo):
        def __call__(self, prompts, done):
            for place in range(len(prompts)):
                done(place, Answer("fine", True) if place else Answer(text, False))

    report = regenerate(
        tasks({"messages": [USER, OLD]}, {"messages": [USER, OLD]}), Half(), tmp_path / "out.jsonl", {}
    )
    assert (report.written, report.empty) == (1, 1)
    with pytest.raises(UserError, match="no answer to any of 1"):
        regenerate(tasks({"messages": [USER, OLD]}), Half(), tmp_path / "none.jsonl", {})
    assert not (tmp_path / "none.jsonl").exists()


def test_bad_conversations(jsonl, tmp_path):
    path = jsonl({"messages": [USER, OLD]}, {"messages": [USER]}, {"input_ids": [1]})
    with pytest.raises(UserError, match=rf"^{path}:2: no assistant text"):
        read_tasks(path, None, False, tmp_path)
    made, skipped = read_tasks(path, None, True, tmp_path)
    assert (len(made), len(skipped)) == (1, 2)
    assert "only chat files" in skipped[1][1]


# -- resuming ------------------------------------------------------------------------------------------------

MANY = [{"messages": [{"role": "user", "content": f"{n}?"}, OLD]} for n in range(40)]


def test_resume_does_only_what_is_left(tasks, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match="planted"):
        regenerate(tasks(*MANY), Echo(fail_at=21), out, {})
    (part,) = tmp_path.glob("out.jsonl.*.part")
    assert not out.exists()
    whole = part.read_bytes().count(b"\n")
    assert whole == 21
    part.write_bytes(part.read_bytes() + b'[30, {"conv')  # torn by a crash
    echo = Echo()
    report = regenerate(tasks(*MANY), echo, out, {})
    assert len(echo.prompts) == 40 - whole
    assert (report.written, report.resumed) == (40, whole)
    assert [row["conversations"][0]["content"] for row in rows_of(out)] == [f"{n}?" for n in range(40)]
    assert not list(tmp_path.glob("*.part"))


def test_other_settings_or_input_start_afresh(tasks, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(UserError):
        regenerate(tasks(*MANY), Echo(fail_at=21), out, {"temperature": 0})
    for rows, settings in ((MANY, {"temperature": 1}), (MANY[1:], {"temperature": 0})):
        echo = Echo()
        regenerate(tasks(*rows), echo, out, settings)
        assert len(echo.prompts) == len(rows)


# -- the target in this process ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    """A hybrid model (gated delta net and full attention) with weights large enough that its answers
    differ."""
    from dflash.models.target import build_tiny

    settings = [
        "hidden_size=32",
        "intermediate_size=64",
        "layers=4",
        "heads=2",
        "kv_heads=1",
        "head_dim=16",
        "linear_heads=2",
    ]
    settings += ["linear_head_dim=16", "vocab_size=512"]
    made = build_tiny(load_config(None, [f"target.tiny.{setting}" for setting in settings]).target).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return made


def make(model, tokenizer, batch, stops=None, **settings):
    return TargetGenerator(model, tokenizer, stops or [tokenizer.eos_token_id], 12, batch=batch, **settings)


@pytest.mark.slow
def test_batch_equals_one_by_one_in_a_hybrid_model(model, tokenizer):
    """Left padding leaves no trace in attention, convolution or recurrent state, whatever the lengths."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, 256, (length,), generator=generator).tolist() for length in (1, 3, 9, 20, 33, 64, 70)
    ]
    together = make(model, tokenizer, 8).answers(prompts)
    alone = [make(model, tokenizer, 1).answers([prompt])[0] for prompt in prompts]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert len({answer.ids for answer in together}) == len(prompts)


def test_stops_at_any_stop_token(model, tokenizer):
    prompt = list(range(40, 60))
    (free,) = make(model, tokenizer, 1).answers([prompt])
    assert (free.finished, len(free.ids)) == (False, 12)
    stop = free.ids[4]
    first = free.ids.index(stop)
    (stopped,) = make(model, tokenizer, 1, stops=[tokenizer.eos_token_id, stop]).answers([prompt])
    assert stopped.finished
    assert stopped.ids == free.ids[: first + 1]
    assert stopped.text == tokenizer.decode(list(free.ids[:first]))


def test_files_of_text_and_of_tokens(model, tokenizer, tasks, tmp_path):
    chat = [
        {"messages": [{"role": "user", "content": text}, OLD]} for text in ("the fox", "a", "def add(a, b):")
    ]
    report = regenerate(tasks(*chat), make(model, tokenizer, 2), tmp_path / "ids.jsonl", {}, as_tokens=True)
    rows = rows_of(tmp_path / "ids.jsonl")
    assert (report.written, report.cut) == (3, 3)
    generator = make(model, tokenizer, 1)
    for row, source in zip(rows, chat, strict=True):
        prompt = generator.prompt_ids(Prompt((source["messages"][0],)))
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"] == [0] * len(prompt) + [1] * 12
    config = DataConfig(path=str(tmp_path / "ids.jsonl"), cache=str(tmp_path))
    assert (
        load_samples(config, tokenizer, vocab_size=512).samples[1].input_ids.tolist() == rows[1]["input_ids"]
    )
    regenerate(tasks(*chat), make(model, tokenizer, 2), tmp_path / "text.jsonl", {})
    text = load_samples(
        DataConfig(path=str(tmp_path / "text.jsonl"), cache=str(tmp_path)), tokenizer, vocab_size=512
    )
    for sample in text.samples:  # cut answers: their end is not in the loss
        assert tokenizer.eos_token_id not in sample.input_ids[sample.loss_mask]


def test_prompt_that_opens_a_thought(model, with_template):
    tokenizer = with_template(T.QWEN35)
    generator = make(model, tokenizer, 1)
    (answer,) = generator.answers([generator.prompt_ids(Prompt((USER,)))])
    assert answer.text.startswith("<think>\n")
    generator = make(model, tokenizer, 1, thinking=False)
    (answer,) = generator.answers([generator.prompt_ids(Prompt((USER,)))])
    assert not answer.text.startswith("<think>\n")


def test_prompt_that_leaves_no_room(model, tokenizer):
    answers = {}
    generator = make(model, tokenizer, 4, context=20)
    short, long = (
        Prompt(({"role": "user", "content": "a"},)),
        Prompt(({"role": "user", "content": "word " * 30},)),
    )
    generator([long, short], answers.__setitem__)
    assert (answers[0].text, answers[0].finished) == ("", False)
    assert len(answers[1].prompt_ids) + len(answers[1].ids) <= 20


def test_conversation_that_the_template_refuses(model, with_template):
    generator = make(model, with_template(T.MISTRAL), 1)
    with pytest.raises(UserError, match=r"^f:3: the chat template refuses it: roles must alternate"):
        generator([Prompt((USER, USER), origin="f:3")], lambda *_: None)


def test_sampling_differs_from_greedy(model, tokenizer):
    prompt = list(range(40, 60))
    (greedy,), (warm,) = (
        make(model, tokenizer, 1).answers([prompt]),
        make(model, tokenizer, 1, temperature=5.0).answers([prompt]),
    )
    assert greedy.ids != warm.ids
    assert make(model, tokenizer, 1, temperature=5.0).answers([prompt])[0].ids == warm.ids


# -- an endpoint ---------------------------------------------------------------------------------------------


class Server:
    """A loopback server with OpenAI's interface; `script` says how the next calls go (status codes or
    texts), and no question in `refused` is answered."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.script: list[object] = []
        self.refused: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, {"data": [{"id": "served"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({"path": self.path, **body})
                outer.headers.append(dict(self.headers))
                step = outer.script.pop(0) if outer.script else None
                if body["messages"][-1]["content"] in outer.refused:
                    step = 400
                if isinstance(step, int):
                    self.reply(step, {"error": "no"})
                elif isinstance(step, dict):
                    self.reply(200, step)
                else:
                    message = {"content": f"to {body['messages'][-1]['content']}", "reasoning_content": step}
                    self.reply(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

            def reply(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(generators, "RETRY_FIRST_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_endpoint_answers_all(server, tasks, tmp_path):
    server.script = ["a thought"]
    endpoint = Endpoint(server.url, "", 99, 0.5, thinking=True, key="secret")
    report = regenerate(tasks(*MANY), ParallelGenerator(endpoint, 4), tmp_path / "out.jsonl", {})
    rows = rows_of(tmp_path / "out.jsonl")
    assert report.written == 40
    assert [row["conversations"][1]["content"] for row in rows] == [f"to {n}?" for n in range(40)]
    assert sum("reasoning_content" in row["conversations"][1] for row in rows) == 1
    request = server.requests[0]
    assert request["path"] == "/v1/chat/completions"
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("served", 99, 0.5)
    assert request["chat_template_kwargs"] == {"enable_thinking": True}
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_endpoint_tries_again_when_that_may_help(server):
    server.script = [503, 429]
    assert Endpoint(f"{server.url}/v1/chat/completions", "m", 9)(Prompt((USER,))).text == "to Hi?"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("script", "message", "calls"),
    [
        ([401], r"/v1/chat/completions: 401 Unauthorized: .*the same command goes on from there", 1),
        ([500] * 9, "500 Internal Server Error", generators.RETRIES),
        ([{"choices": []}], "the reply holds no answer", 1),
        ([{"choices": [{"message": "no"}]}], "the reply holds no answer", 1),
    ],
)
def test_endpoint_that_fails(server, script, message, calls):
    server.script = script
    with pytest.raises(UserError, match=message):
        Endpoint(server.url, "m", 9)(Prompt((USER,)))
    assert len(server.requests) == calls


def test_endpoint_failure_keeps_what_is_finished(server, tasks, tmp_path):
    server.refused = {f"{number}?" for number in range(25, 40)}
    endpoint = Endpoint(server.url, "m", 9)
    with pytest.raises(UserError, match="400"):
        regenerate(tasks(*MANY), ParallelGenerator(endpoint, 2), tmp_path / "out.jsonl", {})
    server.refused, before = set(), len(server.requests)
    report = regenerate(tasks(*MANY), ParallelGenerator(endpoint, 2), tmp_path / "out.jsonl", {})
    assert report.resumed >= 20
    assert len(server.requests) - before == 40 - report.resumed


def test_endpoint_cut_answer_and_tool_arguments(server):
    server.script = [{"choices": [{"message": {"content": "half"}, "finish_reason": "length"}]}]
    history = (
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "x"},
    )
    assert not Endpoint(server.url, "m", 9)(Prompt(history)).finished
    call = server.requests[0]["messages"][1]["tool_calls"][0]
    assert (call["id"], call["function"]["arguments"]) == ("call_0", '{"a": 1}')


def test_nobody_at_the_endpoint(monkeypatch):
    monkeypatch.setattr(generators, "RETRY_FIRST_S", 0.001)
    with pytest.raises(UserError, match=r"^http://127.0.0.1:9/v1/models: .*refused"):
        Endpoint("http://127.0.0.1:9", "", 9)
    with pytest.raises(UserError, match="must begin with http"):
        Endpoint("localhost:8000", "m", 9)


def test_task_needs_an_answer_to_rewrite():
    assert not Task(0, "f:1", [USER], None).advance()
    assert not Task(
        0, "f:1", [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], None
    ).advance()


TINY = (
    "hidden_size=32 intermediate_size=64 layers=8 heads=2 kv_heads=1 head_dim=16 linear_heads=2 "
    "linear_head_dim=16 vocab_size=512"
)


def test_command_regenerates_with_the_built_in_target(jsonl, tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    out, path = tmp_path / "out.jsonl", jsonl(*MANY[:3])
    settings = [f"data.path={path}", f"data.tokenizer={tmp_path / 'tokenizer'}", f"data.cache={tmp_path}"]
    settings += [f"target.tiny.{setting}" for setting in TINY.split()]
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert run("--regenerate", "--out", out, "--max-new-tokens", "5", "--limit", "2", *arguments) == 0
    assert f"{out}: 2 conversations" in capsys.readouterr().out
    assert [row["conversations"][0]["content"] for row in rows_of(out)] == ["0?", "1?"]


@pytest.mark.slow
def test_command_regenerates_with_an_endpoint(server, jsonl, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run("--regenerate", "--from", jsonl(*MANY), "--out", out, "--endpoint", server.url) == 0
    assert f"{out}: 40 conversations" in capsys.readouterr().out
