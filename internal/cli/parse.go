package cli

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/values"
)

// ErrHelp is what [Parse] returns for --help.
var ErrHelp = errors.New("help requested")

// Parse fills flags, a pointer to the struct of a command in [CLI], from the words after the command's name. The command
// line of run, start and exec begins at the first positional word, or after --, and is taken verbatim. Other commands
// accept flags and names in any order. Parse exports --state-dir and --data-dir as environment variables, so that
// processes started in the background inherit them. The error is a usage error, or [ErrHelp]; --json is set even then
// (see [WantsJSON]).
func Parse(flags any, args []string) error {
	if parseGiven(flags, args) {
		return export(flags)
	}
	ctx, err := parse(flags, args)
	if err == nil {
		return export(flags)
	}
	root := ctx.Model.Node
	if f := field(flags, "JSON"); f.IsValid() && asks(root, args, "--json") {
		f.SetBool(true)
	}
	if errors.Is(err, ErrHelp) || asks(root, args, "--help", "-h") {
		return ErrHelp
	}
	return UsageError(flags, explain(root, Name(flags), args, err))
}

// parseGiven parses args with a grammar of only those flags that args contain, and reports success. kong takes
// 5 µs for each flag, which is 0.5 ms for run. Errors and help need the whole grammar.
func parseGiven(flags any, args []string) bool {
	given, letters := map[string]bool{}, ""
	for _, arg := range args {
		if arg == "--" {
			break
		} else if isFlag(arg) {
			name, _, _ := strings.Cut(arg, "=")
			given[name] = true
			letters += name
		}
	}
	var fields []reflect.StructField
	var targets []reflect.Value
	var choose func(all reflect.Value) error
	choose = func(all reflect.Value) (err error) {
		for f, v := range all.Fields() {
			tag := func(key string) string { return f.Tag.Get(key) }
			_, group := f.Tag.Lookup("cmd")
			_, positional := f.Tag.Lookup("arg")
			switch {
			case f.Anonymous && f.Type.Kind() == reflect.Struct:
				err = choose(v)
			case group, positional, given["--"+cmp.Or(tag("name"), spell(f.Name))], given["--"+tag("aliases")], tag("short") != "" && strings.Contains(letters, tag("short")):
				fields = append(fields, reflect.StructField{Name: f.Name, Type: f.Type, Tag: f.Tag})
				targets = append(targets, v)
			case tag("default") != "":
				err = decode(v, tag("default"))
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := choose(reflect.ValueOf(flags).Elem()); err != nil {
		return false
	}
	small := reflect.New(reflect.StructOf(fields))
	if _, err := parse(small.Interface(), args); err != nil {
		return false
	}
	for i, v := range targets {
		v.Set(small.Elem().Field(i))
	}
	return true
}

// parse fills a grammar, which is a pointer to a struct. It returns kong's context also with an error.
func parse(grammar any, args []string) (*kong.Context, error) {
	k, err := kong.New(grammar, append(options(), kong.Name("sbxrun"), kong.Help(func(kong.HelpOptions, *kong.Context) error { return ErrHelp }))...)
	if err != nil {
		panic(fmt.Sprintf("cli: %T: %v", grammar, err)) // TestParseGiven builds all of them
	}
	ctx, err := k.Parse(args)
	for wrong, ok := errors.AsType[*kong.ParseError](err); ok; wrong, ok = errors.AsType[*kong.ParseError](err) {
		if args, ok = reorder(args, wrong.Context); !ok {
			return wrong.Context, err
		}
		ctx, err = k.Parse(args)
	}
	for _, p := range ctx.Model.Positional {
		// kong keeps the -- before a command line.
		if line, ok := p.Target.Addr().Interface().(*[]string); ok && p.Passthrough && len(*line) > 0 && (*line)[0] == "--" {
			*line = (*line)[1:]
		}
	}
	return ctx, useless(ctx)
}

// Execute parses the words after a command's name, runs it, prints its result, and returns the exit code.
func Execute[F any](args []string, command func(*F) (output.Result, error)) int {
	flags := new(F)
	var r output.Result
	err := Parse(flags, args)
	if err == nil {
		r, err = command(flags)
	}
	return Finish(flags, r, err)
}

// Finish prints the outcome of a command with these flags, or the help that they ask for, and returns the exit code.
func Finish(flags any, r output.Result, err error) int {
	if errors.Is(err, ErrHelp) {
		return output.Finish(false, HelpOf(Name(flags)), nil)
	}
	return output.Finish(WantsJSON(flags), r, err)
}

// UsageError returns err as a usage error with a hint to the help of the command. An error with a hint or another code
// stays the same.
func UsageError(flags any, err error) error {
	if e, ok := errors.AsType[*result.Error](err); ok && (e.Code != "usage" || e.Hint != "") {
		return err
	}
	return &result.Error{Code: "usage", Message: err.Error(), Hint: "see sbxrun " + strings.TrimPrefix(Name(flags)+" --help", "run "), Err: err}
}

// useless returns an error for a flag that has no effect without another one.
func useless(ctx *kong.Context) error {
	for _, path := range ctx.Path {
		if path.Flag == nil || !path.Flag.Tag.Has("needs") {
			continue
		}
		missing, met := []string{}, false
		for need := range strings.FieldsSeq(path.Flag.Tag.Get("needs")) {
			name, value, _ := strings.Cut(need, "=")
			if i := slices.IndexFunc(ctx.Model.Flags, func(f *kong.Flag) bool { return f.Name == name }); i >= 0 {
				v := ctx.Model.Flags[i].Target
				met = met || value != "" && v.String() == value || value == "" && !v.IsZero()
				missing = append(missing, "--"+strings.Replace(need, "=", " ", 1))
			}
		}
		if !met {
			return fmt.Errorf("--%s: has no effect without %s", path.Flag.Name, or(missing))
		}
	}
	return nil
}

// options configures kong for each grammar: [word] decodes all values.
func options() []kong.Option {
	all := []kong.Option{
		kong.Exit(func(int) {}),
		kong.FlagNamer(spell),
		kong.KindMapper(reflect.String, kong.MapperFunc(word)),
		kong.KindMapper(reflect.Slice, kong.MapperFunc(word)),
	}
	for _, v := range []any{new(Title), new(Directory), new(values.Size), new(values.Swap), new(values.Number), new(values.Decimal), new(values.Duration),
		new(values.Span), new(values.Percent), new(values.Adjustment), new(values.Signal)} {
		all = append(all, kong.TypeMapper(reflect.TypeOf(v).Elem(), kong.MapperFunc(word)))
	}
	return all
}

// word decodes one value of a flag or a positional argument, and all consecutive words of a repeated argument. Unlike
// kong's own mappers it accepts negative numbers, does not split lists at commas, and refuses empty values.
func word(ctx *kong.DecodeContext, target reflect.Value) error {
	token := ctx.Scan.Pop()
	text := token.String()
	if ctx.Value.Flag != nil {
		switch {
		case token.IsEOL():
			return errors.New("needs a value")
		case token.InferredType().IsAny(kong.FlagToken, kong.ShortFlagToken) && strings.Trim(text[1:2], "0123456789.") != "":
			return fmt.Errorf("needs a value, and %q looks like a flag; if it is the value, write --%s=%[1]s", text, ctx.Value.Name)
		}
	}
	if choices := Choices(ctx.Value.Tag); choices != nil && !slices.ContainsFunc(choices, func(c string) bool {
		return text == c || strings.HasSuffix(c, "=") && strings.HasPrefix(text, c)
	}) {
		return fmt.Errorf("%q: want %s", text, strings.ReplaceAll(or(choices), "=", "=HOST,..."))
	}
	if text == "" && ctx.Value.Flag != nil && target.Type() == reflect.TypeFor[string]() { // usually an unset shell variable
		return errors.New("the value is empty")
	}
	if err := decode(target, text); err != nil {
		return err
	}
	if line, ok := target.Addr().Interface().(*[]string); ok && ctx.Value.Flag == nil {
		for !ctx.Scan.Peek().IsEOL() && (ctx.Value.Passthrough || ctx.Scan.Peek().IsValue()) {
			*line = append(*line, ctx.Scan.Pop().String())
		}
	}
	return nil
}

// decode sets a value from its text.
func decode(target reflect.Value, text string) error {
	switch v := target.Addr().Interface().(type) {
	case encoding.TextUnmarshaler:
		return v.UnmarshalText([]byte(text))
	case *[]string:
		*v = append(*v, text)
	case *string:
		*v = text
	}
	return nil
}

// Bytes returns the value of a size flag where 0 means no limit, and unset without the flag.
func Bytes(size *values.Size, unset values.Size) int64 {
	switch {
	case size == nil:
		return int64(unset)
	case *size == 0:
		return math.MaxInt64
	}
	return int64(*size)
}

// Choices returns the values of a flag, or nil if it takes any. Anything may follow one that ends with =.
func Choices(tag *kong.Tag) []string {
	if !tag.Has("choices") {
		return nil
	}
	return strings.Split(tag.Get("choices"), "|")
}

// reorder moves the words of a repeated positional argument behind the flags that follow them, if kong did not expect
// another word there: kill A --grace 0 B becomes kill --grace 0 A B.
func reorder(args []string, ctx *kong.Context) ([]string, bool) {
	if ctx.Error == nil || !strings.HasPrefix(ctx.Error.Error(), "unexpected argument") {
		return nil, false
	}
	path := ctx.Path
	unexpected := len(args) - len(path[len(path)-1].Remainder())
	for i := len(path) - 1; i >= 0; i-- {
		p := path[i].Positional
		if p == nil || !p.IsCumulative() {
			continue
		}
		end := len(args) - len(path[i].Remainder())
		begin := end - ctx.Value(path[i]).Len()
		for unexpected < len(args) && args[unexpected] == "--" {
			unexpected++
		}
		return slices.Concat(args[:begin], args[end:unexpected], args[begin:end], args[unexpected:]), true
	}
	return nil, false
}

// asks reports whether one of the words is among the flags in args, where they could not be parsed. The word after an
// unknown flag may be its value, so a command line does not begin there.
func asks(node *kong.Node, args []string, words ...string) bool {
	payload := slices.ContainsFunc(node.Positional, func(p *kong.Positional) bool { return p.Passthrough })
	for i, arg := range args {
		switch {
		case arg == "--":
			return false
		case slices.Contains(words, arg):
			return true
		case payload && !isFlag(arg) && (i == 0 || !isFlag(args[i-1]) || strings.Contains(args[i-1], "=")):
			return false
		}
	}
	return false
}

// spell returns the flag for a field: cpu-time for CPUTime.
func spell(field string) string {
	upper := func(i int) bool { return i < len(field) && field[i] >= 'A' && field[i] <= 'Z' }
	b := make([]byte, 0, 2*len(field))
	for i, c := range []byte(field) {
		if i > 0 && upper(i) && (!upper(i-1) || i+1 < len(field) && !upper(i+1)) {
			b = append(b, '-')
		}
		if upper(i) {
			c += 'a' - 'A'
		}
		b = append(b, c)
	}
	return string(b)
}

func isFlag(word string) bool { return strings.HasPrefix(word, "-") && word != "-" }

// Name returns the name of the command that flags is a pointer to the struct of, such as "run" or "snapshot ls".
func Name(flags any) string { return nameIn(reflect.TypeFor[CLI](), reflect.TypeOf(flags).Elem()) }

func nameIn(group, command reflect.Type) string {
	for f := range group.Fields() {
		name := strings.ToLower(f.Name)
		if f.Type == command {
			return name
		}
		if f.Type == reflect.TypeFor[Snapshot]() || f.Type == reflect.TypeFor[Volume]() {
			if within := nameIn(f.Type, command); within != "" {
				return name + " " + within
			}
		}
	}
	return ""
}

// WantsJSON reports whether flags, a pointer to the struct of a command, have --json set, even after an error of [Parse].
func WantsJSON(flags any) bool {
	f := field(flags, "JSON")
	return f.IsValid() && f.Bool()
}

// export sets the variables of --state-dir and --data-dir.
func export(flags any) (err error) {
	for _, dir := range []struct{ field, variable string }{{"StateDir", "SBXRUN_STATE_DIR"}, {"DataDir", "SBXRUN_DATA_DIR"}} {
		if f := field(flags, dir.field); f.IsValid() && f.String() != "" {
			err = errors.Join(err, os.Setenv(dir.variable, f.String()))
		}
	}
	return err
}

func field(flags any, name string) reflect.Value {
	return reflect.ValueOf(flags).Elem().FieldByName(name)
}

// explain rewords kong's error. For an unknown flag it adds a replacement, the other commands with the flag, or a similar
// flag.
func explain(n *kong.Node, command string, args []string, err error) error {
	message := strings.ReplaceAll(err.Error(), `"`, "")
	flag, unknown := strings.CutPrefix(message, "unknown flag ")
	missing, incomplete := strings.CutPrefix(message, "expected ")
	argument, unexpected := strings.CutPrefix(message, "unexpected argument ")
	switch {
	case len(n.Children) > 0 && (incomplete || unexpected):
		var names []string
		for _, c := range n.Children {
			names = append(names, c.Name)
		}
		given := "no command"
		if unexpected {
			argument, _, _ = strings.Cut(argument, ", did you mean ")
			given = fmt.Sprintf("%q", argument)
		}
		return fmt.Errorf("%s: got %s, want %s", command, given, or(names))
	case incomplete:
		return fmt.Errorf("no %s given", strings.Trim(missing, "<> ."))
	case !unknown:
		return errors.New(err.Error())
	}
	flag, _, similar := strings.Cut(flag, ", did you mean ")
	if len(flag) == len("-x") {
		// kong names one letter, or a byte of it, and finds all other letters similar.
		similar = false
		if i := slices.IndexFunc(args, func(arg string) bool { return isFlag(arg) && arg[1] != '-' && strings.Contains(arg, flag[1:]) }); i >= 0 {
			if word := args[i]; len(word) > len("-it") || strings.HasPrefix(word, flag) {
				flag = word
			}
		}
	}
	if hint := instead(command, flag); hint != "" {
		return fmt.Errorf("unknown flag %s: %s", flag, hint)
	}
	var others []string
	for _, c := range Commands() {
		has := func(word string) bool {
			return slices.ContainsFunc(c.Flags, func(f *kong.Flag) bool { return slices.Contains(Spellings(f), word) })
		}
		if c.Path() == command && has("-"+flag) {
			return fmt.Errorf("unknown flag %s, did you mean -%[1]s?", flag)
		}
		if has(flag) {
			others = append(others, c.Path())
		}
	}
	switch {
	case others != nil:
		return fmt.Errorf("unknown flag %s, which is a flag of %s", flag, strings.Join(others, ", "))
	case similar:
		return errors.New(message)
	}
	return fmt.Errorf("unknown flag %s", flag)
}

// instead returns a hint for a flag of another program, such as timeout(1), docker or kill(1), or "".
func instead(command, flag string) string {
	var s values.Signal
	if command == "kill" && s.UnmarshalText([]byte(flag[1:])) == nil {
		name := strings.TrimPrefix(unix.SignalName(syscall.Signal(s)), "SIG")
		return "use -s " + cmp.Or(name, flag[1:]) + " to send a signal, or --grace 0 to kill at once" // real-time signals have no name
	}
	lines := texts()
	return cmp.Or(lines[command+" ?"+flag], lines["* ?"+flag]).help
}

// or lists words: a, b or c.
func or(words []string) string {
	last := len(words) - 1
	if last <= 0 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}
