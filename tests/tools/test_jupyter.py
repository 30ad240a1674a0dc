"""How the course opens JupyterLab; tests/browser/test_jupyterlab.py looks at what comes of it."""

import json
import sys
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from jupyter_server.serverapp import ServerApp

HOUSE = Path(__file__).resolve().parents[2]
JUPYTER = HOUSE / "jupyter"
OVERRIDES = json.loads((JUPYTER / "labconfig" / "default_setting_overrides.json").read_text())
WORKSPACE = json.loads((JUPYTER / "course.jupyterlab-workspace").read_text())
OWN = """
c.ServerApp.tornado_settings = {"headers": {"Content-Security-Policy": "https://school"}}
c.ServerApp.jpserver_extensions = {"a_tool_of_theirs": False}
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that loads the server's settings beside the learner's own, on a machine whose GPU
    display sees so many GPUs."""
    monkeypatch.setenv("LABUTILS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(JUPYTER))
    apps = ModuleType("jupyterlab_nvdashboard.apps")
    apps.gpu = ModuleType("jupyterlab_nvdashboard.apps.gpu")
    monkeypatch.setitem(sys.modules, apps.__name__.partition(".")[0], ModuleType("display"))
    monkeypatch.setitem(sys.modules, apps.__name__, apps)

    def load(gpus: int = 0) -> ServerApp:
        (tmp_path / "jupyter_server_config.py").write_text(OWN)
        apps.gpu.ngpus = gpus
        server = ServerApp()
        server.load_config_file()
        return server

    return load


def test_the_layout_is_put_there_once_and_then_is_the_learners(start, tmp_path):
    settings = start().config.LabApp
    assert tmp_path in Path(settings.user_settings_dir).parents
    (kept,) = Path(settings.workspaces_dir).iterdir()
    assert json.loads(kept.read_text()) == WORKSPACE
    mine = {"data": {"layout-restorer:data": {"mine": True}}, "metadata": {"id": "course"}}
    kept.write_text(json.dumps(mine))
    start()
    assert json.loads(kept.read_text()) == mine
    kept.write_text('{"data": {"torn')
    with pytest.warns(UserWarning, match="layout"):
        assert start().root_dir == str(HOUSE)


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_gpu_display_needs_a_gpu_and_the_learners_settings_stay(start, gpus):
    server = start(gpus)
    assert ("page_config_hook" in server.tornado_settings) == (gpus == 0)
    assert "school" in server.tornado_settings["headers"]["Content-Security-Policy"]
    assert server.jpserver_extensions["a_tool_of_theirs"] is False
    assert server.jpserver_extensions.get("jupyterlab_nvdashboard", True) == (gpus > 0)


@pytest.mark.parametrize("plugin", OVERRIDES)
def test_every_setting_exists_and_takes_its_value(plugin):
    """JupyterLab drops a setting that it doesn't know without a word."""
    package, name = plugin.split(":")
    shared = Path(sys.prefix) / "share" / "jupyter"
    places = [shared / "lab" / "schemas", *(shared / "labextensions").glob("**/schemas")]
    (file,) = [file for place in places if (file := place / package / f"{name}.json").exists()]
    schema = json.loads(file.read_text())
    assert set(OVERRIDES[plugin]) <= set(schema["properties"])
    jsonschema.validate(OVERRIDES[plugin], schema)
