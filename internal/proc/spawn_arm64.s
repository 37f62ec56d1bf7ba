#include "go_asm.h"
#include "textflag.h"

// func spawn(a *spawnArgs) int
//
// A system call changes R0.
TEXT ·spawn(SB), NOSPLIT|NOFRAME, $0-16
	MOVD a+0(FP), R19
	MOVD $0x1111, R0 // CLONE_VM | CLONE_PIDFD | SIGCHLD
	MOVD $0, R1      // the child uses no stack
	MOVD spawnArgs_pidfd(R19), R2
	MOVD $0, R3
	MOVD $0, R4
	MOVD $220, R8    // clone
	SVC
	CBZ R0, child
	MOVD R0, ret+8(FP)
	RET

child:
	MOVD $157, R8 // setsid
	SVC
	MOVD spawnArgs_socket(R19), R0
	MOVD $0, R1
	MOVD $0, R2
	MOVD $24, R8  // dup3
	SVC
	MOVD spawnArgs_program(R19), R0
	MOVD spawnArgs_path(R19), R1
	MOVD spawnArgs_argv(R19), R2
	MOVD spawnArgs_envp(R19), R3
	MOVD $0x1000, R4 // AT_EMPTY_PATH
	MOVD $281, R8    // execveat
	SVC
	NEG R0, R0
	MOVD R0, spawnArgs_errno(R19)

exit:
	MOVD $125, R0
	MOVD $94, R8 // exit_group
	SVC
	B exit
