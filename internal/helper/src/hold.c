// A room's PID 1. It reports that bwrap has built the room and waits for ever.

#include "helper.h"

// The descriptor for the report, which internal/room chooses.
enum { READY = 5 };

_Noreturn void hold(void)
{
	static const char name[] = "sbxrun-room";
	SYS(prctl, PR_SET_NAME, name, 0, 0, 0);
	SYS(write, READY, name, 1, 0, 0);
	SYS(close_range, 0, ~0u, 0, 0, 0);
	for (;;)
		SYS(ppoll, 0, 0, 0, 0, 0);
}
