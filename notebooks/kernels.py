"""Kernels that start in a fraction of a second: forks of a process that has imported the modules of the pages."""

from __future__ import annotations

import multiprocessing
import os
from threading import Thread
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

ENVIRONMENT = {
    # With several threads, the last digits of sums differ between runs.
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}


class ForkedKernel(LocalProvisioner):
    """Starts the kernel of the running Python as a fork, without any state of another page."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel. `cmd` is `python -m ipykernel_launcher`, followed by the arguments of the kernel."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["notebooks.preloaded"])
        arguments = cmd[3:], kwargs["env"], kwargs["cwd"]
        process: Any = _Process(context.Process(target=_run_kernel, args=arguments))
        self.process, self.pid = process, process.pid
        return self.connection_info


class _Process:
    """A forked process with the methods of `subprocess.Popen` that the provisioner calls."""

    stdin = stdout = stderr = None

    def __init__(self, process: Any) -> None:
        process.start()
        self.pid = process.pid
        self.kill, self.terminate = process.kill, process.terminate
        self._process = process

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run_kernel(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run a kernel in this process, until it is asked to end or the runner ends."""
    os.environ.update(environment)
    os.chdir(folder)
    os.setsid()  # Ctrl-C ends the runner, which ends the kernels
    import matplotlib as mpl
    import torch
    from ipykernel.kernelapp import IPKernelApp

    mpl.use(ENVIRONMENT["MPLBACKEND"])
    torch.set_num_threads(1)
    Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    IPKernelApp.launch_instance(arguments)


def _end_with(runner: Any) -> None:
    """End this process when the runner has ended, also where the runner was killed."""
    runner.join()
    os._exit(1)
