#include "go_asm.h"
#include "textflag.h"

// The kernel starts the program here, with the stack that the runtime's entry point expects.
TEXT sbxrun_entry(SB), NOSPLIT|NOFRAME|TOPFRAME, $0-0
	MOVD $9, R10 // RLIMIT_AS
	MOVD $const_minSpace, R11
	MOVD RSP, R9

check:
	MOVD $0, R0 // this process
	MOVD R10, R1
	MOVD $0, R2
	SUB $16, R9, R3
	MOVD $261, R8 // prlimit64
	SVC
	CBNZ R0, start
	MOVD -16(R9), R0
	CMP R11, R0
	BLO refuse
	CMP $2, R10
	BEQ start
	MOVD $2, R10 // RLIMIT_DATA
	MOVD $const_minData, R11
	B check

refuse:
	MOVD $2, R0
	MOVD ·refusal(SB), R1
	MOVD ·refusal+8(SB), R2
	MOVD $64, R8 // write
	SVC
	MOVD $const_exitCode, R0
	MOVD $94, R8 // exit_group
	SVC

start:
	JMP _rt0_arm64_linux(SB)
