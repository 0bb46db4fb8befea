"""Progress bars of services, below the lines that scroll by."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from splitpoint.progress import Progress


class LoadingBars:
    """Bars on a terminal, shown while a service loads. Call `close` at the end."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description:>18}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def show(self, service: str, progress: Progress) -> None:
        if progress.is_complete:
            self.remove(service)
            return
        if service not in self._tasks:
            self._bars.start()  # without effect on bars that are shown already
            what = f"{service} {progress.what}"
            self._tasks[service] = self._bars.add_task(what, total=progress.total_bytes)
        self._bars.update(
            self._tasks[service], total=progress.total_bytes, completed=progress.done_bytes
        )

    def remove(self, service: str) -> None:
        task = self._tasks.pop(service, None)
        if task is not None:
            self._bars.remove_task(task)
        if not self._tasks:
            self.close()

    def close(self) -> None:
        self._bars.stop()
