"""Commands as a user runs them: tables by default, one JSON document with --json."""

import json
import os
import re
import signal
import subprocess
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from slimkv import __version__
from slimkv.cli import main
from slimkv.cli.app import COMMANDS, app, load
from tail import sample


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_version():
    assert run("--version").stdout == f"slimkv {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("plan", "--layers", "2", "--num-kv-heads", "2", "--head-dim", "64", "--format", "int4"),
            "unknown format 'int4'",
        ),
        (
            ("plan", "--layers", "2", "--num-kv-heads", "2", "--head-dim", "64", "--memory", "lots"),
            "cannot read the memory size",
        ),
        (("plan", "--layers", "2"), "--num-kv-heads, --head-dim"),
        (("plan", "--config", "nowhere.json"), "there is no file nowhere.json"),
        (("doctor", "--require", "gpu"), "unknown requirement 'gpu'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message):
    result = run(*arguments, code=2)
    flat = " ".join(result.output.replace("│", " ").split())
    assert message in flat
    assert "Traceback" not in flat


def test_plan_from_numbers():
    arguments = (
        "plan",
        "--layers",
        "32",
        "--num-kv-heads",
        "8",
        "--head-dim",
        "128",
        "--memory",
        "40GiB",
        "--format",
        "raw,k4v4",
    )
    report = json.loads(run(*arguments, "--json").stdout)
    assert report["memory_bytes"] == 40 * 2**30
    assert [f["bytes_per_token"] for f in report["formats"]] == [131072, 33792]
    shown = run(*arguments).stdout
    assert "1,270,992" in shown
    assert "33,792" in shown


def test_plan_from_a_config(tmp_path):
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_size": 640,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = json.loads(run("plan", "--config", str(tmp_path), "--memory", "1GiB", "--format", "k4v4", "--json").stdout)
    assert {g["kind"] for g in report["formats"][0]["groups"]} == {"full", "sliding"}
    assert report["model"] == "gemma3_text"
    result = run("plan", "--config", str(tmp_path), "--layers", "3", code=2)
    assert "--layers" in result.output
    latent = {**config, "layer_types": None, "sliding_window": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(latent))
    report = json.loads(run("plan", "--config", str(tmp_path), "--json").stdout)
    assert {g["kind"] for row in report["formats"] for g in row["groups"]} == {"latent"}
    (tmp_path / "config.json").write_text(json.dumps({**latent, "compress_ratios": [4]}))
    assert "sparse attention" in run("plan", "--config", str(tmp_path), code=2).output


def test_doctor():
    report = json.loads(run("doctor", "--json").stdout)
    assert {c["name"] for c in report["checks"]} >= {
        "python",
        "torch",
        "cuda",
        "triton",
        "transformers",
        "vllm",
        "sglang",
    }
    assert "torch" in run("doctor", "--require", "torch").stdout


def test_doctor_fails_when_something_required_cannot_run(monkeypatch):
    from slimkv import doctor

    monkeypatch.setattr(doctor, "_version", lambda name: None)
    result = run("doctor", "--require", "sglang,torch", "--json", code=1)
    assert json.loads(result.stdout)["failed"] == ["sglang"]
    assert "required but cannot run: sglang" in result.stderr


def test_commands_do_not_import_what_they_do_not_use():
    code = "import sys, slimkv.cli.app as a; [a.load(x) for x in a.COMMANDS]; print(*sys.modules, sep=',')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(",")
    assert "typer" in out
    assert not {"triton", "transformers", "vllm", "sglang", "datasets"} & set(out)


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["plam"]])
def test_the_root_command_does_not_import_torch(words):
    command = [sys.executable, "-X", "importtime", "-m", "slimkv", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (0 if "--" in str(words) else 2)
    names = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "slimkv.cli" in names
    assert not {"torch", "numpy", "slimkv.formats"} & names


def test_the_help_of_the_root_command_is_that_of_its_commands():
    short = {name: load(name).help.split("\n\n")[0] for name in COMMANDS}
    assert short == COMMANDS
    shown = run("--help").stdout
    assert re.findall(r"^. (\w+)  ", shown.partition(" Commands ")[2], re.M) == [*COMMANDS]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_named(missing, monkeypatch):
    for name in [m for m in sys.modules if m.startswith("slimkv.cli.") or m.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"needs {missing}, which is not installed: pip install 'slimkv\[cli\]'"):
        main()


def test_python_m_slimkv():
    done = subprocess.run([sys.executable, "-m", "slimkv", "--version"], capture_output=True, text=True, check=True)
    assert __version__ in done.stdout


PLAN = [sys.executable, "-m", "slimkv", "plan"]


SIZE = ("--layers", "2", "--num-kv-heads", "2", "--head-dim", "64")
PRINTING = [[*PLAN, *SIZE], [*PLAN, *SIZE, "--json"], [*PLAN[:3], "--version"], [*PLAN[:3], "--help"]]


@pytest.fixture(params=[False, True], ids=["buffered", "unbuffered"])
def buffering(request, monkeypatch):
    """Both ways of Python to write: a full disk or a closed pipe shows at the end, or with the first line."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if request.param:
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")


@pytest.mark.parametrize("command", sample(PRINTING, 2))
def test_a_full_disk_is_one_line(command, buffering):
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", sample(PRINTING, 2))
def test_a_closed_pipe_ends_the_command(command, buffering):
    out, into = os.pipe()
    os.close(out)
    with os.fdopen(into, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("module", ["typer", "torch", "slimkv.cli.loading", "transformers"])
def test_an_interrupt_ends_the_command(module, tmp_path):
    """Control-C while modules are imported: once ``module``, or a part of it, is there."""
    command = [sys.executable, "-X", "importtime", "-m", "slimkv", "eval", "needle", "--model", str(tmp_path)]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        printed = iter(process.stderr)
        for line in printed:
            if line.split("|")[-1].strip().startswith(module):
                process.send_signal(signal.SIGINT)
                break
        lines = [line for line in printed if not line.startswith("import time:")]
    assert lines == ["error: interrupted\n"]
    assert process.returncode in (130, -signal.SIGINT)  # for a shell, both are 130


def test_an_interrupt_is_one_line(monkeypatch):
    def interrupted(names):
        raise KeyboardInterrupt

    monkeypatch.setattr("slimkv.cli.doctor.diagnose", interrupted)
    assert run("doctor", code=130).stderr.strip() == "error: interrupted"


def test_an_interrupt_while_modules_are_imported_is_one_line(monkeypatch, capsys):
    class Interrupted(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "slimkv.cli.app", Interrupted("app"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "error: interrupted\n")


def test_a_locale_without_utf_8(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128, "model_type": "mod\u00e8le"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env.pop("PYTHONIOENCODING", None)
    done = subprocess.run([*PLAN, "--config", str(tmp_path)], capture_output=True, env=env, check=True)
    assert b"mod?le: 16.00 GiB" in done.stdout


def test_a_narrow_terminal_cuts_no_figure_off(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    words = ("--layers", "32", "--num-kv-heads", "8", "--head-dim", "128", "--format", "k4v4")
    shown = run("plan", *words).stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_the_version_option_needs_no_extras():
    hidden = "import sys; sys.modules['typer'] = None; sys.argv = ['slimkv', '--version']"
    code = f"{hidden}; import slimkv.cli; slimkv.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"slimkv {__version__}\n"
