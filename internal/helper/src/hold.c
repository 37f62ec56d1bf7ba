// A room's PID 1, a program of its own. It reports that bwrap has built the room and then waits forever.
//
// sbxrun cleanup recognizes abandoned rooms by this program, also those of another version of sbxrun. So it should not
// change.

#include "helper.h"

// The descriptor for the report, which internal/room chooses.
enum { READY = 5 };

_Noreturn void start(long *stack)
{
	static const char name[] = "sbxrun-room";
	(void)stack;
	SYS(prctl, PR_SET_NAME, name, 0, 0, 0);
	SYS(write, READY, name, 1, 0, 0);
	SYS(close_range, 0, ~0u, 0, 0, 0);
	for (;;)
		SYS(ppoll, 0, 0, 0, 0, 0);
}
