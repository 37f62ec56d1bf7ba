#include "go_asm.h"
#include "textflag.h"

// The kernel starts the program here, with the stack that the runtime's entry point expects.
TEXT sbxrun_entry(SB), NOSPLIT|NOFRAME|TOPFRAME, $0-0
	MOVL $9, SI // RLIMIT_AS
	MOVQ $const_minSpace, R12

check:
	XORL DI, DI // this process
	XORL DX, DX
	LEAQ -16(SP), R10
	MOVL $302, AX // prlimit64
	SYSCALL
	TESTQ AX, AX
	JNE start
	CMPQ -16(SP), R12
	JCS refuse
	CMPL SI, $2
	JEQ start
	MOVL $2, SI // RLIMIT_DATA
	MOVQ $const_minData, R12
	JMP check

refuse:
	MOVL $2, DI
	MOVQ ·refusal(SB), SI
	MOVQ ·refusal+8(SB), DX
	MOVL $1, AX // write
	SYSCALL
	MOVL $const_exitCode, DI
	MOVL $231, AX // exit_group
	SYSCALL

start:
	JMP _rt0_amd64_linux(SB)
