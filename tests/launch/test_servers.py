"""Servers beside the ranks: which ports they take, and where their logs go. A script stands in for vLLM's."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.verbs.roots import load_run
from holdfast.errors import ConfigError
from holdfast.features.vllm.processes import Servers, ServerSpec
from holdfast.features.vllm.serving import servers_of
from tests.features.vllm.served import ServedModel, served_tree, serving

STAND_IN = f"""#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


print("the server speaks", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def stand_in(folder: Path) -> str:
    """Return what starts a server that is well, and nothing else."""
    file = folder / "python"
    file.write_text(STAND_IN)
    file.chmod(0o755)
    return str(file)


def test_a_server_that_is_there_already_is_not_taken_for_ours(tmp_path: Path) -> None:
    served = ServedModel()
    with serving(served) as url:
        section = VLLMEngineConfig(url=[url], start=True, python=stand_in(tmp_path))
        servers = Servers(ServerSpec(section, tmp_path, "policy", "float32", 64, True, tmp_path))
        with pytest.raises(ConfigError, match=f"a server that this command did not start answers on {url}"):
            servers.__enter__()

    assert not servers.processes


@pytest.mark.parametrize("has_begun", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_logs_of_servers_stay_with_a_run_that_has_begun(tmp_path: Path, has_begun: bool) -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
    tree = served_tree([url], str(tmp_path))
    tree["rollout"]["engine"] |= {"start": True, "python": stand_in(tmp_path)}
    (tmp_path / "run.yaml").write_text(json.dumps(tree))

    with servers_of(load_run(tmp_path / "run.yaml", [])):
        if has_begun:
            (tmp_path / "r").mkdir()

    log = tmp_path / "r" / "logs" / "server-0.log"
    assert (tmp_path / "r").exists() is has_begun
    assert log.exists() is has_begun
    assert not has_begun or log.read_text().startswith("the server speaks\n")
