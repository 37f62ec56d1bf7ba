// Warm rooms: the maker of inits, and a payload that waits for its command. And the exec of a command.

#include "helper.h"

// The maker stays in a room and makes an init on request, before the init's command is known. Each request has the
// init's socket, gate and timer.
_Noreturn void make(const struct script *s, uint64_t flags, uint32_t init)
{
	static const char step[] = "make a PID namespace in the room";
	static const int numbers[] = {ENTRY_SOCKET, ENTRY_GATE, ENTRY_TIMER};
	static struct rights rights;
	for (;;) {
		char byte;
		int count;
		long n = receive(ENTRY_SOCKET, &byte, 1, 0, &rights, &count);
		if (n == 0 || failed(n))
			quit(0); // sbxrun is dead or has closed the socket
		if (count != 3)
			fail(step, -EMFILE, 0);
		long pid = must(step, sys(__NR_clone, (long)(flags | CLONE_PARENT | SIGCHLD), 0, 0, 0, 0, 0));
		if (pid == 0) {
			// They were received in this order, above the maker's own, so no dup3 replaces one that is still needed.
			for (int i = 0; i < 3; i++)
				if (rights.fds[i] != numbers[i])
					SYS(dup3, rights.fds[i], numbers[i], O_CLOEXEC, 0, 0);
			SYS(close_range, ENTRY_FILES, ~0u, 0, 0, 0);
			run(s, init);
		}
		must(step, SYS(close_range, ENTRY_TIMER, ~0u, 0, 0, 0));
	}
}

_Noreturn void take_command(int gate)
{
	static const char step[] = "receive the command";
	static struct rights rights;
	char byte;
	int count;
	long n = must(step, receive(gate, &byte, 1, 0, &rights, &count));
	if (n == 0)
		quit(0); // sbxrun is dead or has given up
	if (count != 4)
		fail(step, -EMFILE, 0);
	const struct script *s = load(rights.fds[3]);
	for (int i = 0; i < 3; i++)
		must(step, SYS(dup3, rights.fds[i], i, 0, 0, 0));
	for (int i = 0; i < 4; i++)
		SYS(close, rights.fds[i], 0, 0, 0, 0);
	run(s, 0);
}

// Executes the first of the paths that is a program, as execvp(3) does. The last path is followed by a null pointer.
// argv[-1] is free for the shell. It returns an error.
long execute(char *const *paths, char **argv, char *const *envp)
{
	static char shell[] = "/bin/sh";
	long error = -ENOENT;
	for (; *paths; paths++) {
		long r = SYS(execve, *paths, argv, envp, 0, 0);
		if (r == -ENOEXEC) { // a script without an interpreter line
			char *name = argv[0];
			argv[-1] = shell;
			argv[0] = *paths;
			r = SYS(execve, shell, argv - 1, envp, 0, 0);
			argv[0] = name;
		}
		if (r == -ENOENT || r == -ENOTDIR)
			continue;
		error = r;
		if (r != -EACCES)
			break;
	}
	return error;
}
