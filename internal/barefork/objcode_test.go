package barefork

import (
	"bytes"
	"cmp"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// This file builds a program and reads its object code.

// object is a program with its functions that have been disassembled.
type object struct {
	arch      string
	file      string
	symbols   []elf.Symbol // functions, by address
	text      []byte
	textAddr  uint64
	functions map[string]*function
}

// function describes a disassembled function.
type function struct {
	name   string
	source string // file, without directories of the build machine
	frame  int    // bytes of stack, without the return address pushed by a call
	calls  []call
	// indirect lists calls and jumps through a register or memory, as "file:line
	// instruction".
	indirect []string
	// unknown lists instructions that this test does not understand.
	unknown []string
}

// call is a call of another function, or a jump to it.
type call struct{ to, at string }

// build builds a package for Linux without cgo, like a release.
func build(t *testing.T, dir, pkg, arch string, flags ...string) *object {
	t.Helper()
	name := filepath.Join(t.TempDir(), "program")
	// Without DWARF, linking takes half the time, and the code is the same.
	args := append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags=-w", "-o", name}, flags...)
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	o := &object{arch: arch, file: name, functions: map[string]*function{}}
	file, err := elf.Open(name)
	harness.Must(t, err)
	defer file.Close()
	all, err := file.Symbols()
	if err != nil {
		t.Fatalf("%s: %v", pkg, err)
	}
	for _, s := range all {
		if elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			o.symbols = append(o.symbols, s)
		}
	}
	slices.SortFunc(o.symbols, func(a, b elf.Symbol) int { return cmp.Compare(a.Value, b.Value) })
	section := file.Section(".text")
	if section == nil {
		t.Fatalf("%s: no .text", pkg)
	}
	o.textAddr = section.Addr
	if o.text, err = section.Data(); err != nil {
		t.Fatal(err)
	}
	return o
}

// matching returns the names of all functions whose whole name matches a pattern.
func (o *object) matching(pattern string) (names []string) {
	re := whole(pattern)
	for _, s := range o.symbols {
		if re.MatchString(s.Name) {
			names = append(names, s.Name)
		}
	}
	return names
}

// callers returns the names of all functions that directly call, or jump to, the
// function with this name. It first searches the bytes of the whole program,
// because disassembling the whole program takes seconds.
func (o *object) callers(name string) ([]string, error) {
	i := slices.IndexFunc(o.symbols, func(s elf.Symbol) bool { return s.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("%s: no such function", name)
	}
	target := o.symbols[i].Value
	var candidates []string
	found := func(addr uint64) {
		// The last symbol that does not begin after addr.
		i, exact := slices.BinarySearchFunc(o.symbols, addr, func(s elf.Symbol, addr uint64) int { return cmp.Compare(s.Value, addr) })
		if !exact {
			i--
		}
		if i >= 0 && addr < o.symbols[i].Value+o.symbols[i].Size {
			candidates = append(candidates, o.symbols[i].Name)
		}
	}
	if o.arch == "arm64" {
		for i := 0; i+4 <= len(o.text); i += 4 {
			// B and BL: 26 bits, in instructions.
			if op := binary.LittleEndian.Uint32(o.text[i:]); op&0x7c000000 == 0x14000000 {
				addr := o.textAddr + uint64(i)
				if addr+uint64(int64(int32(op<<6)>>6)*4) == target {
					found(addr)
				}
			}
		}
	} else {
		for i := 0; i+5 <= len(o.text); i++ {
			// CALL and JMP: 32 bits, from the end of the instruction.
			if o.text[i] == 0xe8 || o.text[i] == 0xe9 {
				addr := o.textAddr + uint64(i)
				if addr+5+uint64(int64(int32(binary.LittleEndian.Uint32(o.text[i+1:])))) == target {
					found(addr)
				}
			}
		}
	}
	// Bytes of other instructions or data can look like a call.
	if err := o.disassemble(candidates); err != nil {
		return nil, err
	}
	slices.Sort(candidates)
	return slices.DeleteFunc(slices.Compact(candidates), func(c string) bool {
		return !slices.ContainsFunc(o.functions[c].calls, func(c call) bool { return c.to == name })
	}), nil
}

// disassemble disassembles the functions with these names, each once.
func (o *object) disassemble(names []string) error {
	var quoted []string
	for _, name := range names {
		if o.functions[name] == nil {
			quoted = append(quoted, regexp.QuoteMeta(name))
		}
	}
	if len(quoted) == 0 {
		return nil
	}
	cmd := exec.Command("go", "tool", "objdump", "-s", "^("+strings.Join(quoted, "|")+")$", o.file)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go tool objdump: %w\n%s", err, stderr.String())
	}
	for _, text := range strings.Split("\n"+string(out), "\nTEXT ")[1:] {
		f, err := o.parse(text)
		if err != nil {
			return err
		}
		if o.functions[f.name] != nil {
			return fmt.Errorf("there are two functions %s", f.name)
		}
		o.functions[f.name] = f
	}
	for _, name := range names {
		if o.functions[name] == nil {
			return fmt.Errorf("go tool objdump does not find %s", name)
		}
	}
	return nil
}

// instruction is a line of objdump.
type instruction struct {
	at   string // file:line
	addr uint64
	code string // in hexadecimal
	op   string
	args []string
}

// Forms of operands.
var (
	symbolOperand   = regexp.MustCompile(`^(.+?)(\+(?:0x)?[0-9a-f]+)?\(SB\)$`)
	relativeOperand = regexp.MustCompile(`^(-?\d+)\(PC\)$`)                    // arm64: in instructions
	absoluteOperand = regexp.MustCompile(`^0x([0-9a-f]+)$`)                    // amd64
	stackOperand    = regexp.MustCompile(`^(-?(?:0x[0-9a-f]+|\d+)|)\(R?SP\)$`) // an offset from the stack pointer
	immediate       = regexp.MustCompile(`^\$(-?(?:0x[0-9a-f]+|\d+))$`)
)

// conditional matches the conditional branches of arm64: BEQ, CBNZ, TBZ. BIC has three
// letters, too, but a different operand.
var conditional = regexp.MustCompile(`^(B[A-Z]{2}|CBN?ZW?|TBN?Z)$`)

// parse parses objdump's output for one function: its name and file, and a line for
// each instruction.
func (o *object) parse(text string) (*function, error) {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	name, source, ok := strings.Cut(lines[0], "(SB) ")
	if !ok {
		return nil, fmt.Errorf("go tool objdump: %q", lines[0])
	}
	f := &function{name: name, source: source}
	var code []instruction
	for _, line := range lines[1:] {
		fields := strings.FieldsFunc(line, func(r rune) bool { return r == '\t' })
		if len(fields) < 4 {
			return nil, fmt.Errorf("go tool objdump: %s: %q", name, line)
		}
		addr, err := strconv.ParseUint(fields[1], 0, 64)
		if err != nil {
			return nil, fmt.Errorf("go tool objdump: %s: %q: %w", name, line, err)
		}
		op, args, _ := strings.Cut(strings.TrimSpace(fields[3]), " ")
		code = append(code, instruction{strings.TrimSpace(fields[0]), addr, fields[2], op, operands(args)})
	}
	if len(code) == 0 {
		return nil, fmt.Errorf("go tool objdump: %s has no instructions", name)
	}
	f.control(o, code)
	f.stack(o, code)
	return f, nil
}

// operands splits at commas outside parentheses.
func operands(text string) (list []string) {
	depth, start := 0, 0
	for i, c := range text {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		case ',':
			if depth == 0 {
				list = append(list, strings.TrimSpace(text[start:i]))
				start = i + 1
			}
		}
	}
	if rest := strings.TrimSpace(text[start:]); rest != "" {
		list = append(list, rest)
	}
	return list
}

func (i instruction) String() string {
	return i.at + " " + strings.TrimSpace(i.op+" "+strings.Join(i.args, ", "))
}

func (i instruction) last() string {
	if len(i.args) == 0 {
		return ""
	}
	return i.args[len(i.args)-1]
}

// branches reports whether execution may continue elsewhere than at the next instruction,
// and whether it always does. A return is not a branch.
func (i instruction) branches(arch string) (may, always bool) {
	switch {
	case i.op == "CALL":
		return true, false
	case i.op == "JMP":
		return true, true
	case arch == "amd64":
		return i.op[0] == 'J' || strings.HasPrefix(i.op, "LOOP") || i.op == "XBEGIN", false
	}
	return conditional.MatchString(i.op) && (relativeOperand.MatchString(i.last()) || symbolOperand.MatchString(i.last())), false
}

// control collects the calls and jumps that leave the function.
func (f *function) control(o *object, code []instruction) {
	begin, end := code[0].addr, code[len(code)-1].addr
	for _, i := range code {
		if i.op == "?" {
			if o.arch != "arm64" || strings.Trim(i.code, "0") != "" { // zeros are padding
				f.unknown = append(f.unknown, i.String())
			}
			continue
		}
		switch i.op { // other ways into the kernel, or out of Go code
		case "SYSENTER", "HVC", "SMC", "ERET", "IRETQ", "SYSRET", "LCALL", "LJMP", "RETFQ":
			f.unknown = append(f.unknown, i.String())
		}
		may, _ := i.branches(o.arch)
		target := i.last()
		if !may {
			// In other instructions a symbol is data and not a target.
			continue
		}
		inside := func(addr uint64) {
			if i.op == "CALL" || addr < begin || addr > end {
				f.unknown = append(f.unknown, i.String())
			}
		}
		if m := symbolOperand.FindStringSubmatch(target); m != nil {
			if m[1] != f.name || i.op == "CALL" {
				f.calls = append(f.calls, call{m[1], i.at})
			}
		} else if m := relativeOperand.FindStringSubmatch(target); m != nil {
			inside(i.addr + uint64(int64(number(m[1]))*4))
		} else if m := absoluteOperand.FindStringSubmatch(target); m != nil {
			addr, err := strconv.ParseUint(m[1], 16, 64)
			if err != nil {
				addr = 0
			}
			inside(addr)
		} else {
			f.indirect = append(f.indirect, i.String())
		}
	}
}

// stack adds up the stack use of the instructions. A Go function allocates its frame
// once, at its beginning, and releases it before each return. The code after a return
// or a jump has the frame again.
func (f *function) stack(o *object, code []instruction) {
	depth := 0
	moved := map[string]int{} // arm64: a register that is the stack pointer less this
	for _, i := range code {
		grows, ok := i.stack(o.arch, moved)
		if !ok {
			f.unknown = append(f.unknown, i.String()+" (changes the stack pointer)")
		}
		depth += grows
		f.frame = max(f.frame, depth)
		if _, always := i.branches(o.arch); always || i.op == "RET" {
			depth = f.frame
		}
	}
}

// stack returns the number of bytes by which an instruction lowers the stack pointer. ok is false if the
// instruction changes it in another way.
func (i instruction) stack(arch string, moved map[string]int) (grows int, ok bool) {
	if i.op == "CALL" || len(i.args) == 0 && !strings.HasPrefix(i.op, "PUSH") && !strings.HasPrefix(i.op, "POP") && i.op != "LEAVE" && i.op != "ENTER" {
		return 0, true
	}
	if arch == "amd64" {
		switch {
		case strings.HasPrefix(i.op, "PUSH"):
			return 8, true
		case strings.HasPrefix(i.op, "POP") && !strings.HasPrefix(i.op, "POPCNT"):
			return -8, i.last() != "SP"
		case i.op == "LEAVE", i.op == "ENTER":
			return 0, false
		case i.op == "XCHGQ" && slices.Contains(i.args, "SP"):
			return 0, false
		case i.last() != "SP", strings.HasPrefix(i.op, "CMP"), strings.HasPrefix(i.op, "TEST"):
			return 0, true
		case i.op == "SUBQ" || i.op == "ADDQ":
			if m := immediate.FindStringSubmatch(i.args[0]); m != nil {
				if i.op == "ADDQ" {
					return -number(m[1]), true
				}
				return number(m[1]), true
			}
		case i.op == "LEAQ":
			if m := stackOperand.FindStringSubmatch(i.args[0]); m != nil {
				return -number(m[1]), true
			}
		}
		return 0, false
	}
	// Loads and stores that write the address back: MOVD.W R30, -96(RSP).
	if strings.HasSuffix(i.op, ".W") || strings.HasSuffix(i.op, ".P") {
		for _, arg := range i.args {
			if m := stackOperand.FindStringSubmatch(arg); m != nil {
				return -number(m[1]), true
			}
			if strings.Contains(arg, "(RSP)") {
				return 0, false
			}
		}
		return 0, true
	}
	switch {
	case i.op == "SUB" && len(i.args) == 3 && i.args[1] == "RSP":
		// A large frame: SUB $592, RSP, R20, and then MOVD R20, RSP.
		if m := immediate.FindStringSubmatch(i.args[0]); m != nil {
			if i.args[2] == "RSP" {
				return number(m[1]), true
			}
			moved[i.args[2]] = number(m[1])
			return 0, true
		}
	case i.op == "ADD" && len(i.args) == 3 && i.args[1] == "RSP" && i.last() == "RSP":
		if m := immediate.FindStringSubmatch(i.args[0]); m != nil {
			return -number(m[1]), true
		}
	case i.op == "MOVD" && i.last() == "RSP":
		grows, ok = moved[i.args[0]]
		delete(moved, i.args[0])
		return grows, ok
	}
	delete(moved, i.last())
	return 0, i.last() != "RSP" || strings.HasPrefix(i.op, "CM") || i.op == "TST"
}

// number parses a number as objdump prints it. The empty string, as in "(SP)", is 0.
func number(text string) int {
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 0, 64)
	if err != nil {
		panic(err) // the patterns above match only numbers
	}
	return int(n)
}

func whole(pattern string) *regexp.Regexp { return regexp.MustCompile(`^(?:` + pattern + `)$`) }

func goEnv(t *testing.T, name string) string {
	t.Helper()
	out, err := exec.Command("go", "env", name).Output()
	if err != nil {
		t.Fatalf("go env %s: %v", name, err)
	}
	return strings.TrimSpace(string(out))
}

// repository returns the directory of go.mod.
func repository(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	harness.Must(t, err)
	return dir
}

// modulePath returns the module path of go.mod.
func modulePath(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository(t), "go.mod"))
	harness.Must(t, err)
	line, _, _ := strings.Cut(string(text), "\n")
	return strings.TrimSpace(strings.TrimPrefix(line, "module "))
}
