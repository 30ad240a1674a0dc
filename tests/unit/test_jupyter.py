"""How the course opens JupyterLab: a layout that stays the learner's, settings that exist, a GPU
display where there is a GPU. tests/browser/test_jupyterlab.py looks at what comes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jsonschema
import nbformat
import pytest
from jupyter_server.serverapp import ServerApp
from traitlets.config import Config, PyFileConfigLoader

HOUSE = Path(__file__).resolve().parents[2]
JUPYTER = HOUSE / "jupyter"
OVERRIDES = json.loads(
    (JUPYTER / "labconfig" / "default_setting_overrides.json").read_text(encoding="utf-8")
)
WORKSPACE = json.loads((JUPYTER / "course.jupyterlab-workspace").read_text(encoding="utf-8"))


def configuration() -> Config:
    return PyFileConfigLoader("jupyter_server_config.py", path=str(JUPYTER)).load_config()


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The server's settings, beside those in a `jupyter_server_config.py` of the learner's own."""

    def start(own: str = "") -> ServerApp:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "jupyter_server_config.py").write_text(own, encoding="utf-8")
        monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "own"))
        monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(JUPYTER))
        server = ServerApp()
        server.load_config_file()
        return server

    return start


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LABUTILS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gpu_display(monkeypatch):
    """Put a GPU display in the place of jupyterlab_nvdashboard's: one that sees so many GPUs, or
    that fails.
    """

    def install(gpus: int | None) -> None:
        apps = ModuleType("jupyterlab_nvdashboard.apps")
        apps.gpu = ModuleType("jupyterlab_nvdashboard.apps.gpu")
        if gpus is not None:
            apps.gpu.ngpus = gpus
        monkeypatch.setitem(
            sys.modules, "jupyterlab_nvdashboard", ModuleType("jupyterlab_nvdashboard")
        )
        monkeypatch.setitem(
            sys.modules, "jupyterlab_nvdashboard.apps", apps if gpus is not None else None
        )

    return install


def test_the_layout_is_put_there_once_and_then_is_the_learners(cache):
    workspaces = Path(configuration().LabApp.workspaces_dir)
    (kept,) = workspaces.iterdir()
    assert cache in workspaces.parents
    assert json.loads(kept.read_text(encoding="utf-8")) == WORKSPACE
    mine = {"data": {"layout-restorer:data": {"mine": True}}, "metadata": {"id": "course"}}
    kept.write_text(json.dumps(mine), encoding="utf-8")
    configuration()
    assert json.loads(kept.read_text(encoding="utf-8")) == mine
    kept.unlink()
    configuration()
    assert json.loads(kept.read_text(encoding="utf-8")) == WORKSPACE


def test_nothing_is_kept_in_the_learners_own_configuration(cache):
    lab = configuration().LabApp
    assert cache in Path(lab.workspaces_dir).parents
    assert cache in Path(lab.user_settings_dir).parents


def test_the_layout_opens_what_is_there():
    data = WORKSPACE["data"]
    opened = [value["data"]["path"] for key, value in data.items() if key.startswith("notebook:")]
    docked = data["layout-restorer:data"]["main"]["dock"]["widgets"]
    assert docked == [f"notebook:{path}" for path in opened]
    for path in [*opened, data["file-browser-filebrowser:cwd"]["path"]]:
        assert (HOUSE / path).exists()
    assert configuration().LabApp.default_url == f"/lab/workspaces/{WORKSPACE['metadata']['id']}"


@pytest.mark.parametrize(("gpus", "shown"), [(0, False), (None, False), (1, True), (8, True)])
def test_the_gpu_display_is_there_where_it_can_show_something(gpu_display, started, gpus, shown):
    gpu_display(gpus)
    server = started()
    hook = server.tornado_settings.get("page_config_hook", lambda handler, page: page)
    page = hook(None, {"disabledExtensions": ["another"]})
    assert ("jupyterlab-nvdashboard" not in page["disabledExtensions"]) == shown
    assert server.jpserver_extensions.get("jupyterlab_nvdashboard", True) == shown
    assert "another" in page["disabledExtensions"]


OWN = """
c.ServerApp.tornado_settings = {"headers": {"Content-Security-Policy": "frame-ancestors 'self' https://school"}}
c.ServerApp.jpserver_extensions = {"a_tool_of_theirs": False}
"""


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_learners_own_settings_of_the_server_stay(gpu_display, started, gpus):
    gpu_display(gpus)
    server = started(OWN)
    assert "https://school" in server.tornado_settings["headers"]["Content-Security-Policy"]
    assert server.jpserver_extensions["a_tool_of_theirs"] is False
    assert ("page_config_hook" in server.tornado_settings) == (gpus == 0)
    assert server.root_dir == str(HOUSE)


@pytest.mark.parametrize("torn", ['{"data": {"layout-resto', "", "[]", "{}", '{"metadata": {}}'])
def test_a_layout_that_cannot_be_read_costs_no_other_setting(cache, started, torn):
    (kept,) = Path(configuration().LabApp.workspaces_dir).iterdir()
    kept.write_text(torn, encoding="utf-8")
    assert_all_but_the_layout(cache, started)
    assert kept.read_text(encoding="utf-8") == torn


def test_a_folder_that_cannot_be_written_to_costs_no_other_setting(cache, started):
    cache.write_text("no folder", encoding="utf-8")  # whoever runs this, root too
    assert_all_but_the_layout(cache, started)


def assert_all_but_the_layout(cache: Path, started) -> None:
    with pytest.warns(UserWarning, match="the course's layout is not in") as warned:
        server = started()
    assert len([one for one in warned if "layout" in str(one.message)]) == 1
    assert server.root_dir == str(HOUSE)
    lab = server.config.LabApp
    assert (lab.workspaces_dir, lab.user_settings_dir) == (
        str(cache / "jupyterlab" / "workspaces"),
        str(cache / "jupyterlab" / "settings"),
    )
    assert callable(server.config.FileContentsManager.pre_save_hook)


def test_a_save_drops_what_opening_put_in_and_nothing_else():
    hook = configuration().FileContentsManager.pre_save_hook
    learnt = {"kernelspec": {"name": "python3"}, "language_info": {"version": "3.12.12"}}
    notebook = {"type": "notebook", "content": {"metadata": learnt, "cells": ["mine"]}}
    hook(model=notebook, path="notebooks/00.ipynb", contents_manager=None)
    assert notebook["content"] == {
        "metadata": {"kernelspec": {"name": "python3"}},
        "cells": ["mine"],
    }
    text = {"type": "file", "content": "language_info"}
    hook(model=text, path="README.md", contents_manager=None)
    assert text["content"] == "language_info"


@pytest.mark.parametrize("plugin", OVERRIDES)
def test_every_setting_exists_and_takes_its_value(plugin):
    """In the versions installed: a setting that JupyterLab or an extension renamed would be dropped
    without a word.
    """
    package, name = plugin.split(":")
    shared = Path(sys.prefix) / "share" / "jupyter"
    places = [shared / "lab" / "schemas", *(shared / "labextensions").glob("**/schemas")]
    (file,) = [file for place in places if (file := place / package / f"{name}.json").exists()]
    schema = json.loads(file.read_text(encoding="utf-8"))
    assert set(OVERRIDES[plugin]) <= set(schema["properties"])
    jsonschema.validate(OVERRIDES[plugin], schema)


def test_each_setting_is_explained():
    told = (JUPYTER / "README.md").read_text(encoding="utf-8")
    for plugin in OVERRIDES:
        assert f"| `{plugin.removeprefix('@jupyterlab/')}`: " in told


def test_the_container_and_make_open_the_same_jupyterlab():
    dockerfile, makefile = (
        (HOUSE / name).read_text(encoding="utf-8") for name in ("Dockerfile", "Makefile")
    )
    folder = re.search(r"^WORKDIR (\S+)$", dockerfile, re.MULTILINE)[1]
    assert f"JUPYTER_CONFIG_PATH={folder}/jupyter " in dockerfile
    assert re.search(r'^CMD \["jupyter", "lab"', dockerfile, re.MULTILINE)
    assert re.search(
        r'^\tJUPYTER_CONFIG_PATH="\$\(CURDIR\)/jupyter\S*" .* -m jupyter lab ',
        makefile,
        re.MULTILINE,
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_notebooks_takes_out_what_a_run_in_jupyterlab_left(tmp_path):
    stored = HOUSE / "notebooks" / "05_scale_into_fp8.ipynb"
    run = nbformat.read(stored, as_version=4)
    run.metadata.language_info = {"name": "python", "version": "3.12.12"}
    for number, cell in enumerate(cell for cell in run.cells if cell.cell_type == "code"):
        cell.execution_count, cell.outputs = number, [nbformat.v4.new_output("stream", text="said")]
        cell.metadata.execution = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
    nbformat.write(run, tmp_path / "left.ipynb")
    words = [
        "make",
        "--dry-run",
        "--no-print-directory",
        "-C",
        HOUSE,
        "notebooks",
        f"VENV={sys.prefix}",
    ]
    plan = subprocess.run(words, capture_output=True, text=True, check=True).stdout.replace(
        "\\\n", " "
    )
    (line,) = [line for line in plan.splitlines() if "nbconvert" in line]
    command = line.partition(" notebooks/")[0]
    subprocess.run(f"{command} left.ipynb", shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "left.ipynb").read_text(encoding="utf-8") == stored.read_text(
        encoding="utf-8"
    )
