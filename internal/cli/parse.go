package cli

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/values"
)

// ErrHelp is what [Parse] returns for --help.
var ErrHelp = errors.New("help requested")

// Parse fills flags, a pointer to the struct of a command in [CLI], from the words after
// the command's name, and returns the words that are not flags. Those that end with a
// command line begin at the first word that is no flag, and are taken verbatim; names may
// come before and after flags. After -- there are no flags. An error is the user's, or
// [ErrHelp]; of several the first is returned, and what is right is set all the same.
func Parse(flags any, args []string) (words []string, err error) {
	c := commandOf(flags)
	if words, err = c.parse(args); err != nil {
		return nil, err
	}
	if field(flags, "Help").Bool() {
		return nil, ErrHelp
	}
	switch {
	case c.Payload():
	case c.Sandboxes() == "none" && !c.Names() && len(words) > 0:
		return nil, fmt.Errorf("%s takes no names, got %q", c.Name, words[0])
	case strings.Contains(c.Words(), "[SANDBOX]") && len(words) == 0:
	case strings.Contains(c.Words(), "[PATH...]") && len(words) > 0:
	case c.Sandboxes() == "one" && len(words) != 1:
		return nil, fmt.Errorf("%s takes one sandbox, got %d", c.Name, len(words))
	}
	return words, nil
}

func (c Command) parse(args []string) (words []string, err error) {
	for i := range c.Flags {
		f := &c.Flags[i]
		if def := f.Default(); def != "" {
			if err := f.set(def); err != nil {
				return nil, fmt.Errorf("--%s: %w", f.Name, err)
			}
		}
	}
	verbatim := c.Payload()
	for len(args) > 0 {
		word := args[0]
		switch {
		case word == "--":
			words, args = append(words, args[1:]...), nil
		case isFlag(word):
			rest, wrong := c.take(word, args[1:])
			if wrong != nil {
				err, rest = cmp.Or(err, wrong), pastWrong(args)
			}
			args = rest
		case verbatim:
			words, args = args, nil
		default:
			words, args = append(words, word), args[1:]
		}
	}
	return words, cmp.Or(err, c.checkExclusive())
}

// pastWrong returns the words after a wrong flag: whether errors are told as JSON may still
// be said there. A word right after it may be its value, and not the beginning of a command.
func pastWrong(args []string) []string {
	if len(args) > 1 && !isFlag(args[1]) && !strings.Contains(args[0], "=") {
		return args[2:]
	}
	return args[1:]
}

// isFlag reports whether a word is a flag, or several of one letter.
func isFlag(word string) bool { return strings.HasPrefix(word, "-") && word != "-" }

// take sets what one word with flags says, with a value from the words after it where one
// is needed, and returns the words that are left.
func (c Command) take(word string, rest []string) ([]string, error) {
	name, long := strings.CutPrefix(word, "--")
	if !long { // of one letter; behind the first one that needs a value comes that
		for i, letter := range word[1:] {
			f := c.find(func(f *Flag) bool { return f.Short() == string(letter) })
			if f == nil {
				return nil, c.unknown(word, "-"+string(letter))
			}
			if f.TakesValue() {
				value := word[1+i+len(string(letter)):]
				return f.take(value, value != "", rest)
			}
			f.given = true
			f.value.SetBool(true)
		}
		return rest, nil
	}
	name, value, attached := strings.Cut(name, "=")
	f := c.find(func(f *Flag) bool { return f.Name == name || name != "" && f.Alias() == name })
	if f == nil {
		return nil, c.unknown("--"+name, "--"+name)
	}
	return f.take(value, attached, rest)
}

// take sets the flag to the value that is attached to it, or to the next word if it needs
// one, and returns the words that are left.
func (f *Flag) take(value string, attached bool, rest []string) ([]string, error) {
	name := f.Name
	switch {
	case attached:
	case !f.TakesValue():
		value = "true"
	case len(rest) == 0:
		return nil, fmt.Errorf("--%s: needs a value", name)
	case isFlag(rest[0]) && strings.Trim(rest[0][1:2], "0123456789.") != "": // -1 is a number
		return nil, fmt.Errorf("--%s: needs a value, and %q looks like a flag; if it is the value, write --%[1]s=%[2]s", name, rest[0])
	default:
		value, rest = rest[0], rest[1:]
	}
	f.given = true
	if !f.accepts(value) {
		instead := f.tag.Get("instead")
		return nil, fmt.Errorf("--%s %q: want %s%s", name, value, or(f.words()), instead)
	}
	if err := f.set(value); err != nil {
		return nil, fmt.Errorf("--%s: %w", name, err)
	}
	return rest, nil
}

// checkExclusive refuses two flags of which only one may be given.
func (c Command) checkExclusive() error {
	given := map[string]string{}
	for _, f := range c.Flags {
		if !f.given {
			continue
		}
		if key := f.tag.Get("xor"); key != "" {
			if other := given[key]; other != "" {
				return fmt.Errorf("--%s and --%s can't be used together", other, f.Name)
			}
			given[key] = f.Name
		}
	}
	return nil
}

// foreign returns the flags that do what a flag of timeout, docker, env or the like does, or a field of serve's.
func foreign(flag string) []string {
	switch flag {
	case "-V":
		return []string{"version"}
	case "-C", "--chdir":
		return []string{"workdir"}
	case "--volume", "--mount":
		return []string{"bind"}
	case "--network":
		return []string{"net"}
	case "--rw":
		return []string{"write"}
	case "--lifetime", "--ttl", "--time_limit", "--time-limit":
		return []string{"timeout"}
	case "--ulimit":
		return []string{"nofile", "fsize", "stack"}
	case "--pids-limit":
		return []string{"pids"}
	case "-n", "--lines":
		return []string{"tail"}
	case "-a", "--archive":
		return []string{"recursive"}
	}
	return nil
}

// needless returns what to do in place of a flag of docker's that stands for what the command does
// anyway; "" if it is none.
func (c Command) needless(flag string) string {
	switch c.Name + " " + flag {
	case "run -i", "run --interactive", "exec -i", "exec --interactive":
		return "stdin is the command's already; -t for a terminal"
	case "start -d", "start --detach":
		return "leave it out: start always returns"
	case "run --rm":
		return "leave it out: run leaves nothing behind"
	}
	return ""
}

// signalOf returns the signal that kill(1) takes a flag for, as -9 or -SIGKILL; "" if it is none.
func signalOf(word string) string {
	var signal values.Signal
	if signal.UnmarshalText([]byte(word[1:])) != nil {
		return ""
	}
	return cmp.Or(strings.TrimPrefix(unix.SignalName(syscall.Signal(signal)), "SIG"), word[1:]) // real-time signals have no name
}

// unknown returns the error for a flag that the command does not have. It names what may be
// meant: what another tool's flag is here; else flags that begin with what was typed, which is
// word; else the commands that have such a flag; else flags with almost that name.
func (c Command) unknown(word, flag string) error {
	typed := strings.TrimLeft(word, "-")
	var meant []string
	known := strings.HasPrefix(flag, "--") || len(word) <= len("-it") // -interval is no -i
	switch {
	case c.Name == "kill" && signalOf(word) != "":
		return fmt.Errorf("unknown flag %s: to send a signal write -s %s; --grace 0 kills at once", word, signalOf(word))
	case known && c.needless(flag) != "":
		return fmt.Errorf("unknown flag %s: %s", word, c.needless(flag))
	case known:
		meant = c.spelt(func(name string) bool { return slices.Contains(foreign(flag), name) })
	}
	if meant == nil {
		meant = c.spelt(func(name string) bool { return strings.HasPrefix(name, typed) })
	}
	if meant == nil {
		var others []string
		for _, other := range Commands() {
			if slices.ContainsFunc(other.Flags, func(f Flag) bool { return slices.Contains(f.Spellings(), flag) }) {
				others = append(others, other.Name)
			}
		}
		if others != nil {
			err := fmt.Errorf("unknown flag %s, which is a flag of %s", flag, strings.Join(others, ", "))
			if (c.Name == "start" || c.Name == "exec") && atEnd[flag] != "" {
				err = fmt.Errorf("%w; in a sandbox that lives on, that is sbxrun %s", err, atEnd[flag])
			}
			return err
		}
		meant = c.spelt(func(name string) bool { return distance(name, typed) <= len(typed)/3 })
	}
	if meant == nil {
		return fmt.Errorf("unknown flag %s", flag)
	}
	return fmt.Errorf("unknown flag %s, did you mean %s?", word, or(meant))
}

// atEnd are flags for what run does at its end, with the commands that do it while a sandbox lives.
var atEnd = map[string]string{"--get": "cp SANDBOX:SRC DST", "--diff": "diff SANDBOX", "--apply": "apply SANDBOX", "--apply-delete": "apply SANDBOX --delete", "--apply-all": "apply SANDBOX --all"}

// spelt returns the flags with such names, as they are typed.
func (c Command) spelt(matches func(name string) bool) (flags []string) {
	for _, f := range c.Flags {
		for _, name := range []string{f.Name, f.Alias()} {
			if name != "" && matches(name) {
				flags = append(flags, "--"+name)
			}
		}
	}
	return flags
}

// Alike returns the command with almost this name, or "".
func Alike(word string) string {
	for _, c := range Commands() {
		if d := distance(c.Name, word); d <= (len(word)+1)/3 && d < len(c.Name) {
			return c.Name
		}
	}
	return ""
}

// distance returns how many letters must be added, removed or replaced to turn a into b
// (Levenshtein distance).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

// or lists words: a, b or c.
func or(words []string) string {
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// SplitExec divides what [Parse] has returned of the words of exec: the name of a sandbox,
// and the command, with one -- between them or not. An error is the user's.
func SplitExec(words []string) (name string, command []string, err error) {
	if len(words) == 0 || words[0] == "--" {
		return "", nil, errors.New("no sandbox given")
	}
	name, command = words[0], words[1:]
	if len(command) > 0 {
		switch first := command[0]; {
		case first == "--":
			command = command[1:]
		case isFlag(first):
			return "", nil, fmt.Errorf("%s: flags come before the sandbox; a command of such a name comes after --", first)
		}
	}
	if len(command) == 0 {
		return "", nil, errors.New("no command given")
	}
	return name, command, nil
}
