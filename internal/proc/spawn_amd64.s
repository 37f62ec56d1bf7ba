#include "go_asm.h"
#include "textflag.h"

// func spawn(a *spawnArgs) int
//
// A system call changes AX, CX and R11.
TEXT ·spawn(SB), NOSPLIT|NOFRAME, $0-16
	MOVQ a+0(FP), BX
	MOVL $0x1111, DI // CLONE_VM | CLONE_PIDFD | SIGCHLD
	XORL SI, SI      // the child uses no stack
	MOVQ spawnArgs_pidfd(BX), DX
	XORL R10, R10
	XORL R8, R8
	MOVL $56, AX     // clone
	SYSCALL
	TESTQ AX, AX
	JEQ child
	MOVQ AX, ret+8(FP)
	RET

child:
	MOVL $112, AX // setsid
	SYSCALL
	MOVQ spawnArgs_socket(BX), DI
	XORL SI, SI
	XORL DX, DX
	MOVL $292, AX // dup3
	SYSCALL
	MOVQ spawnArgs_program(BX), DI
	MOVQ spawnArgs_path(BX), SI
	MOVQ spawnArgs_argv(BX), DX
	MOVQ spawnArgs_envp(BX), R10
	MOVL $0x1000, R8 // AT_EMPTY_PATH
	MOVL $322, AX    // execveat
	SYSCALL
	NEGQ AX
	MOVQ AX, spawnArgs_errno(BX)

exit:
	MOVL $125, DI
	MOVL $231, AX // exit_group
	SYSCALL
	JMP exit
