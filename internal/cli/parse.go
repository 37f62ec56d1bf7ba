package cli

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/values"
)

// ErrHelp is what [Parse] returns for --help.
var ErrHelp = errors.New("help requested")

// Parse fills flags, a pointer to the struct of a command in [CLI], from the words after the command's name. The command
// line of run, start and exec begins at the first positional word, or after --, and is taken verbatim. Other commands
// accept flags and names in any order. Parse exports --state-dir and --data-dir as environment variables, so that
// processes started in the background inherit them. The error is a usage error, or [ErrHelp]; --json is set even then.
func Parse(flags any, args []string) error {
	err := parseGiven(flags, args)
	if err == nil {
		return nil
	}
	payload := field(flags, "Command").IsValid()
	if f := field(flags, "JSON"); f.IsValid() && asks(args, payload, "--json") {
		f.SetBool(true)
	}
	if errors.Is(err, ErrHelp) || asks(args, payload, "--help", "-h") {
		return ErrHelp
	}
	// The message for an unknown flag needs all flags.
	if _, whole := Model().Parse(append(strings.Fields(Name(flags)), args...)); whole != nil {
		err = explain(whole)
	}
	return UsageError(flags, err)
}

// parseGiven fills flags. Its grammar has only the flags in args, because kong takes 5 µs for each, which is 0.5 ms for
// all of run.
func parseGiven(flags any, args []string) error {
	given := map[string]bool{} // long names, without and with the dashes inside, and letters
	for _, arg := range args {
		if name, long := strings.CutPrefix(arg, "--"); long {
			name, _, _ = strings.Cut(name, "=")
			given[strings.ReplaceAll(name, "-", "")], given[name] = true, true
		} else if isFlag(arg) {
			for _, letter := range arg {
				given[string(letter)] = true
			}
		}
	}
	delete(given, "") // from --
	target := reflect.ValueOf(flags).Elem()
	var fields []reflect.StructField
	for _, f := range reflect.VisibleFields(target.Type()) {
		switch {
		case f.Anonymous:
		case strings.HasPrefix(string(f.Tag), "arg:"), given[strings.ToLower(f.Name)], given[f.Tag.Get("short")], given[f.Tag.Get("aliases")]:
			fields = append(fields, f)
		case f.Tag.Get("default") != "":
			_ = decode(target.FieldByIndex(f.Index), f.Tag.Get("default")) // TestParseGiven parses it
		}
	}
	grammar := reflect.New(reflect.StructOf(fields))
	if _, err := build(grammar.Interface()).Parse(args); err != nil {
		return err
	}
	for i, f := range fields {
		target.FieldByIndex(f.Index).Set(grammar.Elem().Field(i))
	}
	return nil
}

// build returns kong's parser for a grammar.
func build(grammar any) (k *kong.Kong) {
	help := func(kong.HelpOptions, *kong.Context) error { return ErrHelp }
	mapper := func(ctx *kong.DecodeContext, target reflect.Value) error {
		if ctx.Value.Flag == nil && ctx.Value.IsCumulative() {
			// kong expects all words of an argument together. Repeat the argument for more after flags.
			ctx.Value.Required = false
			for _, n := range nodes(k) {
				if slices.Contains(n.Positional, ctx.Value) {
					n.Positional = append(n.Positional, ctx.Value)
				}
			}
		}
		return word(ctx, target)
	}
	// The name "" stands for all values without a type tag.
	k = kong.Must(grammar, kong.Name("sbxrun"), kong.Help(help), kong.NamedMapper("", kong.MapperFunc(mapper)), kong.WithAfterApply(apply))
	return k
}

// apply sets the variable of --state-dir or --data-dir, and returns an error for a flag that has no effect without another.
func apply(ctx *kong.Context, path *kong.Path) error {
	f, missing := path.Flag, []string{}
	switch {
	case f == nil:
		return nil
	case f.Name == "state-dir" || f.Name == "data-dir":
		dir, err := filepath.Abs(f.Target.String())
		return cmp.Or(err, os.Setenv("SBXRUN_"+strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_")), dir))
	case !f.Tag.Has("needs"):
		return nil
	}
	for need := range strings.FieldsSeq(f.Tag.Get("needs")) {
		name, value, _ := strings.Cut(need, "=")
		if other := flagOf(ctx.Flags(), "--"+name); other != nil {
			if value == "" && !other.Target.IsZero() || value != "" && other.Target.String() == value {
				return nil
			}
			missing = append(missing, "--"+strings.Replace(need, "=", " ", 1))
		}
	}
	return fmt.Errorf("--%s: has no effect without %s", f.Name, or(missing))
}

// word decodes the value of a flag, a positional argument, names, or the words of a command line. Unlike kong's own mappers it
// accepts negative numbers, does not split lists at commas, keeps bytes that are not UTF-8, and refuses empty values.
func word(ctx *kong.DecodeContext, target reflect.Value) error {
	if target.Kind() == reflect.Bool {
		if kong.NewRegistry().RegisterDefaults().ForValue(target).Decode(ctx, target) != nil {
			return errors.New("takes no value")
		}
		return nil
	}
	token, choices := ctx.Scan.Pop(), strings.Split(ctx.Value.Tag.Get("choices"), "|")
	text := token.String()
	switch {
	case ctx.Value.Flag == nil && target.Kind() == reflect.Slice:
		if text != "--" || !ctx.Value.Passthrough {
			target.Set(reflect.Append(target, reflect.ValueOf(text)))
		}
		for next := ctx.Scan.Peek(); !next.IsEOL() && (ctx.Value.Passthrough || next.IsValue()); next = ctx.Scan.Peek() {
			target.Set(reflect.Append(target, reflect.ValueOf(ctx.Scan.Pop().String())))
		}
		return nil
	case ctx.Value.Flag == nil:
	case token.IsEOL():
		return errors.New("needs a value")
	case token.InferredType().IsAny(kong.FlagToken, kong.ShortFlagToken) && strings.Trim(text[1:2], "0123456789.") != "":
		return fmt.Errorf("needs a value, and %q looks like a flag; if it is the value, write --%s=%[1]s", text, ctx.Value.Name)
	case text == "" && target.Kind() == reflect.String: // usually an unset shell variable
		return errors.New("the value is empty")
	case choices[0] != "" && !slices.ContainsFunc(choices, func(c string) bool {
		begin := c[:strings.Index(c, "=")+1]
		return text == c || begin != "" && strings.HasPrefix(text, begin)
	}):
		hint := ""
		if ctx.Value.Name == "output-limit" && new(values.Maximum).UnmarshalText([]byte(text)) == nil {
			hint = "; --max-output " + text + " sets the size"
		}
		return fmt.Errorf("invalid value %q: want %s%s", text, or(choices), hint)
	}
	return decode(target, text)
}

// decode sets a value from its text, or appends to it.
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

// asks reports whether one of the words is among the flags in args, which could not be parsed. The word after an
// unknown flag may be its value, so a command line, which follows the flags with payload, does not begin there.
func asks(args []string, payload bool, words ...string) bool {
	for i, arg := range args {
		switch {
		case slices.Contains(words, arg):
			return true
		case arg == "--" || payload && !isFlag(arg) && (i == 0 || !isFlag(args[i-1]) || strings.Contains(args[i-1], "=")):
			return false
		}
	}
	return false
}

func isFlag(word string) bool { return strings.HasPrefix(word, "-") && word != "-" }

// Command returns a function that parses the words after a command's name, runs the command, prints its result, and
// returns the exit code.
func Command[F any](run func(*F) (output.Result, error)) func(args []string) int {
	return func(args []string) int {
		flags := new(F)
		var r output.Result
		err := Parse(flags, args)
		if err == nil {
			r, err = run(flags)
		}
		return Finish(flags, r, err)
	}
}

// Finish prints the outcome of a command with these flags, or the help that they ask for, and returns the exit code.
func Finish(flags any, r output.Result, err error) int {
	if errors.Is(err, ErrHelp) {
		r, err = Help(Name(flags)), nil
	}
	f := field(flags, "JSON")
	return output.Finish(f.IsValid() && f.Bool(), r, err)
}

// UsageError returns err as a usage error with a hint to the help of the command. An error with a hint or another code
// stays the same.
func UsageError(flags any, err error) error {
	if e, ok := errors.AsType[*result.Error](err); ok && (e.Code != "usage" || e.Hint != "") {
		return err
	}
	return &result.Error{Code: "usage", Message: err.Error(), Hint: "see sbxrun " + strings.TrimPrefix(Name(flags)+" --help", "run "), Err: err}
}

// Group reports a missing or unknown word after the name of a group of commands, which is the first of args, or prints
// the group's help.
func Group(args []string) int {
	name, given, hint := args[0], "given", ""
	if asks(args, false, "--help", "-h") {
		return output.Finish(false, Help(name), nil)
	}
	if len(args) > 1 {
		given, hint = strconv.Quote(args[1]), instead(name, args[1])
	}
	want := or(strings.Split(strings.TrimSuffix(texts()[name+" usage:"], " ..."), "|"))
	message := fmt.Sprintf("no %s command %s: want %s", name, given, want)
	return output.Fail(&result.Error{Code: "usage", Message: message, Hint: cmp.Or(hint, "see sbxrun "+name+" --help")})
}

func field(flags any, name string) reflect.Value {
	return reflect.ValueOf(flags).Elem().FieldByName(name)
}

// explain rewords the error of [Model]'s parser. For an unknown flag it adds a replacement, the other commands with the
// flag, or kong's question about a similar one.
func explain(err error) error {
	message := strings.ReplaceAll(err.Error(), `"`, "")
	if missing, ok := strings.CutPrefix(message, "expected "); ok {
		return fmt.Errorf("no %s given", strings.Trim(missing, "<> ."))
	}
	wrong, ok := errors.AsType[*kong.ParseError](err)
	if word, more := strings.CutPrefix(message, "unexpected argument "); more && ok && flagOf(wrong.Context.Selected().Flags, "--name") != nil {
		return fmt.Errorf("unexpected argument %s: use --name %[1]s", word)
	}
	flag, similar, _ := strings.Cut(strings.TrimPrefix(message, "unknown flag "), ", did you mean ")
	if !ok || !strings.HasPrefix(message, "unknown flag ") {
		return err
	}
	ctx, n := wrong.Context, wrong.Context.Selected()
	if len(flag) == len("-x") { // kong names one letter, or a byte of it, and finds all other letters similar
		similar = ""
		rest := ctx.Path[len(ctx.Path)-1].Remainder()
		if word := ctx.Args[len(ctx.Args)-len(rest)]; len(word) > len("-it") || strings.HasPrefix(word, flag) {
			flag = word
		}
	}
	hint := instead(n.Path(), flag)
	var others []string
	for _, c := range ctx.Model.Leaves(false) {
		if flagOf(c.Flags, flag) != nil {
			others = append(others, strings.Fields(c.Path())[0])
		}
	}
	switch {
	case hint != "":
		hint = ": " + hint
	case flagOf(n.Flags, "-"+flag) != nil:
		hint = ", did you mean -" + flag + "?"
	case others != nil:
		hint = ", which is a flag of " + strings.Join(slices.Compact(others), ", ")
	case similar != "":
		hint = ", did you mean " + similar
	}
	return fmt.Errorf("unknown flag %s%s", flag, hint)
}

// instead returns a hint for a word of another program, such as timeout(1), docker or kill(1), or "".
func instead(command, word string) string {
	if command == "kill" && new(values.Signal).UnmarshalText([]byte(word[1:])) == nil {
		return "use -s " + word[1:] + " to send a signal, or --grace 0 to kill at once"
	}
	lines := texts()
	return cmp.Or(lines[command+" ?"+word], lines["* ?"+word])
}

// or lists words: a, b or c.
func or(words []string) string {
	list := strings.Join(words, ", ")
	if i := strings.LastIndex(list, ", "); i >= 0 {
		list = list[:i] + " or" + list[i+1:]
	}
	return list
}
