"""JupyterLab as the course opens it: `make lab` names this folder in JUPYTER_CONFIG_PATH. More in
README.md beside it.

Options on the command line go before what is set here (`make lab ARGS="--port 9000"`), and what a
learner chooses in JupyterLab's menus goes before labconfig/. That and the layout are kept apart
from ~/.jupyter, which stays as it is.
"""

import os
import warnings
from pathlib import Path
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from jupyterlab_server.workspaces_handler import WorkspacesManager

from labutils.profiling import machine

HERE = Path(__file__).resolve().parent
WORKSPACE = "course"
KEPT = Path(os.environ.get("LABUTILS_CACHE") or "~/.cache/labutils").expanduser() / "jupyterlab"


def lay_out() -> None:
    """Put the course's layout where JupyterLab keeps them, unless the learner has one: theirs
    outlives a restart.

    Only warns where the folder can't be written to, or the layout there can't be read: Jupyter
    would drop all of this file.
    """
    layouts = WorkspacesManager(KEPT / "workspaces")
    try:
        if not layouts.load(WORKSPACE)["data"]:
            layouts.save(
                WORKSPACE, (HERE / f"{WORKSPACE}.jupyterlab-workspace").read_text(encoding="utf-8")
            )
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ) as error:  # the last three: no layout is in the file
        warnings.warn(
            f"the course's layout is not in {layouts.workspaces_dir}: {error!r}", stacklevel=2
        )


class Notebooks(AsyncLargeFileManager):
    """Files as Jupyter keeps them; but a notebook that was merely opened counts as unchanged.

    JupyterLab writes into each notebook that it opens which Python its kernel has. Here it finds
    that written already, and in a file it is never kept.
    """

    async def get(self, *args: Any, **options: Any) -> dict:
        model = await super().get(*args, **options)
        if model["type"] == "notebook" and model["content"]:
            metadata = model["content"]["metadata"]
            if metadata.get("kernelspec", {}).get("name") == "python3":
                metadata["language_info"] = IPythonKernel.language_info
        return model


def leave_no_trace_of_opening(model: dict, **_: object) -> None:
    """Take out of a notebook that is saved what `Notebooks` or JupyterLab put in."""
    if model["type"] == "notebook":
        model["content"]["metadata"].pop("language_info", None)


def gpus() -> int:
    """How many GPUs the GPU display can show; 0 where its package, the driver or the card is not
    there.
    """
    try:
        from jupyterlab_nvdashboard.apps import gpu
    except Exception:  # pynvml has two dozen ways to say no, and the display catches one of them
        return 0
    return gpu.ngpus


def without_gpu_display(handler: object, page: dict) -> dict:
    """The page's configuration without the panel whose every button would lead nowhere."""
    page["disabledExtensions"] = [*page.get("disabledExtensions", []), "jupyterlab-nvdashboard"]
    return page


c = get_config()  # noqa: F821, Jupyter hands it to this file

# The repository is the root, in whatever folder JupyterLab was started: results/ and TEACHING.md
# are within reach.
c.ServerApp.root_dir = str(HERE.parent)
c.LabApp.workspaces_dir = str(KEPT / "workspaces")
c.LabApp.user_settings_dir = str(
    KEPT / "settings"
)  # jupyterlab-execute-time sets one of its own accord at each start
c.LabApp.custom_css = True
c.ServerApp.tornado_settings.update({"static_custom_path": [str(HERE / "custom")]})
c.LabApp.default_url = f"/lab/workspaces/{WORKSPACE}"
# The labs come first: their text halves, their solutions and the optional page are out of sight.
c.ContentsManager.hide_globs = ["__pycache__", "*.pyc", "*~", "py", "solutions", "optional"]
c.ServerApp.contents_manager_class = Notebooks
c.FileContentsManager.pre_save_hook = leave_no_trace_of_opening
warnings.filterwarnings(
    "ignore", message="Overriding existing pre_save_hook"
)  # with itself: it is set once a class

# The status bar: CPU and memory of the server and its kernels, out of the memory of this machine or
# container.
c.ResourceUseDisplay.track_cpu_percent = True
c.ResourceUseDisplay.mem_limit = int((machine.ram_gb() or 0) * 1e9)
# Its figures for Prometheus would stop the server for 50 ms a process each second, DataLoader
# workers included.
c.ResourceUseDisplay.enable_prometheus_metrics = False

if (
    not gpus()
):  # beside what the learner's own files say in these, which an assignment would replace
    c.ServerApp.jpserver_extensions.update({"jupyterlab_nvdashboard": False})
    c.ServerApp.tornado_settings.update({"page_config_hook": without_gpu_display})

lay_out()
