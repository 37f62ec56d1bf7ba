"""Client of ``sbxrun serve``: run untrusted commands and programs.

:class:`Client` is for threads, :class:`AsyncClient` for asyncio. A non-zero exit code and a
timeout are reports. Exceptions are for what has not run (:class:`Refused`), of which something
may be left (:class:`Unproven`), or of which the answer did not come (:class:`Lost`).
"""

from ._asyncio import AsyncClient, AsyncProcess, AsyncSession
from ._sync import Client, Process, Session
from ._wire import Cell, Entry, Error, Event, File, Language, Lost, Refused, Report, Status, Unproven

__all__ = [
    "AsyncClient", "AsyncProcess", "AsyncSession", "Cell", "Client", "Entry", "Error", "Event", "File", "Language", "Lost", "Process",
    "Refused", "Report", "Session", "Status", "Unproven",
]
