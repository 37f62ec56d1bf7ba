// Tests the reading of scripts with mutated ones: fuzz SECONDS SEED FILE... For the compilers' sanitizers; system calls
// do nothing and return arbitrary results.

#include "helper.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static jmp_buf over;
static uint64_t state;
static long budget;
static char *script;
static size_t script_size;

static uint64_t arbitrary(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

long sys(long number, long a, long b, long c, long d, long e, long f)
{
	(void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
	if (number == __NR_exit_group || --budget < 0)
		longjmp(over, 1);
	if (number == __NR_lseek)
		return (long)script_size;
	if (number == __NR_mmap)
		return (long)script;
	switch (arbitrary() % 4) {
	case 0:
		return -(long)(arbitrary() % 134);
	case 1:
		return 0;
	default:
		return (long)(arbitrary() % 64);
	}
}

long become(unsigned long flags)
{
	return sys(__NR_clone, (long)flags, 0, 0, 0, 0, 0);
}

long clone_on(unsigned long flags, void *stack, void (*run)(void *), void *arg)
{
	(void)stack;
	long pid = sys(__NR_clone, (long)flags, 0, 0, 0, 0, 0);
	if (pid == 0)
		run(arg);
	return pid;
}

static void mutate(char *text, size_t size)
{
	static const uint64_t odd[] = {0, 1, 7, 8, 0x7f, 0xff, 0xffff, 0x7fffffff, 0xffffffff, 0xfffffffffffffff8, ~0ull};
	for (int n = (int)(arbitrary() % 8); n >= 0; n--) {
		size_t at = arbitrary() % 3 ? arbitrary() % size : arbitrary() % (size < 400 ? size : 400);
		uint64_t word = arbitrary() % 2 ? odd[arbitrary() % (sizeof odd / sizeof *odd)] : arbitrary() % (2 * size);
		size_t width = (size_t)1 << arbitrary() % 4;
		if (at + width <= size)
			memcpy(text + at, &word, width);
	}
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	time_t end = time(0) + atol(argv[1]);
	state = strtoull(argv[2], 0, 0) | 1;
	static unsigned long runs, accepted;
	while (time(0) < end) {
		FILE *in = fopen(argv[3 + arbitrary() % (unsigned)(argc - 3)], "rb");
		static char seed[1 << 20];
		if (!in)
			return 2;
		size_t size = fread(seed, 1, sizeof seed, in);
		fclose(in);
		static int i;
		for (i = 0; i < 1000; i++, runs++) {
			// An allocation of the exact size shows every read past its end.
			script_size = arbitrary() % 8 ? size : arbitrary() % size + 1;
			script = malloc(script_size);
			memcpy(script, seed, script_size);
			mutate(script, script_size);
			if (arbitrary() % 2 && script_size >= 4) { // most others are refused for their size
				uint32_t right = (uint32_t)script_size;
				memcpy(script, &right, sizeof right);
			}
			budget = 2000;
			volatile int loaded = 0;
			if (!setjmp(over)) {
				static struct process p;
				const struct script *s = load(0, 0);
				loaded = 1;
				run(&p, s, 0);
			}
			accepted += (unsigned long)loaded;
			free(script);
		}
	}
	printf("%lu scripts, of which %lu were accepted\n", runs, accepted);
	return accepted == 0;
}
