"""Nothing that came with a model or a data set is run: no code, no pickle."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest

from dflash.config import Config, TargetConfig
from dflash.data.conversations import load_tokenizer
from dflash.device import Device
from dflash.models.target import inspect_target, load_target
from steptime.errors import UserError
from tests.decode import parts

pytestmark = pytest.mark.fault
ROOT = Path(__file__).parents[2]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    parts.make_target(parts.hybrid_model(), tmp_path / "target")
    return tmp_path / "target"


def trap(folder: Path) -> tuple[Path, str]:
    """A file that appears when the code beside it runs, and that code."""
    sprung = folder.parent / "sprung"
    return sprung, f"open({str(sprung)!r}, 'w').close()\n"


@pytest.mark.parametrize("known", [True, False])
def test_code_beside_a_model_is_not_run(target: Path, known: bool) -> None:
    sprung, code = trap(target)
    (target / "evil.py").write_text(code)
    config = json.loads((target / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    if not known:
        config["model_type"] = "nobody-knows-it"
    (target / "config.json").write_text(json.dumps(config))
    settings = TargetConfig(model=str(target), layer_ids=(0, 1))
    if known:
        load_target(settings, Device("cpu"))
    else:
        with pytest.raises(UserError) as caught:
            inspect_target(settings)
        assert "\n" not in str(caught.value)
    assert not sprung.exists()


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    sprung, code = trap(folder)
    (folder / "evil.py").write_text(code)
    kind = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    config = Config()
    config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(folder)})})
    with pytest.raises(UserError) as caught:
        load_tokenizer(config)
    assert "\n" not in str(caught.value)
    assert not sprung.exists()


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple:
        return exec, (self.code,)


def test_a_pickle_among_the_weights_is_not_run(target: Path) -> None:
    sprung, code = trap(target)
    for path in target.glob("*.safetensors*"):
        path.unlink()
    (target / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Evil(code)}))
    with pytest.raises(UserError, match="cannot load its weights") as caught:
        load_target(TargetConfig(model=str(target), layer_ids=(0, 1)), Device("cpu"))
    assert "\n" not in str(caught.value)
    assert not sprung.exists()
    pickle.loads((target / "pytorch_model.bin").read_bytes())
    assert sprung.exists(), "the trap itself works"


def unpickles(source: str) -> list[str]:
    """What in a source could read a pickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.partition(".")[0] in ("pickle", "dill")]
        elif isinstance(node, ast.ImportFrom) and node.module in ("pickle", "dill"):
            found.append(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load"):
            words = {one.arg: ast.unparse(one.value) for one in node.keywords}
            safe = words.get("weights_only") == "True" or ast.unparse(node.func) == "np.load"
            if not safe or words.get("allow_pickle") == "True":
                found.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += ["trust_remote_code"] if ast.unparse(node.value) != "False" else []
    return found


def test_no_source_reads_a_pickle_or_trusts_remote_code() -> None:
    paths = [*(ROOT / "dflash").rglob("*.py"), *(ROOT / "steptime").rglob("*.py")]
    assert len(paths) > 100
    found = {path.name: unpickles(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: words for name, words in found.items() if words} == {}
    planted = ("import pickle", "torch.load(x)", "np.load(x, allow_pickle=True)", "f(trust_remote_code=1)")
    assert all(unpickles(source) for source in planted)
    assert unpickles("torch.load(x, weights_only=True)\nnp.load(x)") == []
