#include "textflag.h"

TEXT ·stack(SB), NOSPLIT|NOFRAME, $0-8
	MOVD RSP, R1
	MOVD n+0(FP), R0
	MOVD R0, RSP
	MOVD R1, RSP
	RET
