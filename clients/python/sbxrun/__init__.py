"""Client of ``sbxrun serve``: run untrusted commands and programs.

:class:`Client` is for threads, :class:`AsyncClient` for asyncio. A non-zero exit code and a
timeout are reports. Exceptions mean that nothing has run (:class:`Refused`), that processes may
still be running (:class:`Unproven`), or that the response did not arrive (:class:`Lost`).
"""

from ._asyncio import AsyncClient, AsyncProcess, AsyncSession
from ._sync import Cancel, Client, Process, Session
from ._wire import Cancelled, Cell, Entry, Error, Event, File, Image, Language, Lost, Refused, Report, Status, Stored, Unproven

__all__ = [
    "AsyncClient", "AsyncProcess", "AsyncSession", "Cancel", "Cancelled", "Cell", "Client", "Entry", "Error", "Event", "File", "Image", "Language",
    "Lost", "Process", "Refused", "Report", "Session", "Status", "Stored", "Unproven",
]
