package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/alecthomas/kong"
)

// Parse fills flags, a pointer to one command's struct, from the words after
// the command's name, and returns the payload's words. An error is the user's.
func Parse[F any](flags *F, args []string) (payload []string, err error) {
	if payload, ok := quick(flags, args); ok {
		return payload, nil
	}
	*flags = *new(F) // without what the quick way may have left
	k, err := New(flags)
	if err != nil {
		return nil, err
	}
	words, payload := split(k.Model, args)
	if n := len(words); n > 0 && payload == nil && takesValue(k.Model, words[n-1]) {
		return nil, fmt.Errorf("%s: needs a value", words[n-1]) // kong's words for it are hard to read
	}
	if _, err := k.Parse(words); err != nil {
		var p *kong.ParseError
		if errors.As(err, &p) {
			err = p.Unwrap()
		}
		return nil, err
	}
	return payload, nil
}

// split divides the words after the command's name into sbxrun's flags and the
// payload's words. The payload begins at the first word that is neither a flag
// nor a flag's value, or after --, and is taken verbatim.
func split(model *kong.Application, args []string) (flags, payload []string) {
	for i := 0; i < len(args); i++ {
		word := args[i]
		switch {
		case word == "--":
			return args[:i], args[i+1:]
		case word == "-" || !strings.HasPrefix(word, "-"):
			return args[:i], args[i:]
		case takesValue(model, word):
			i++
		}
	}
	return args, nil
}

// takesValue says whether the next word belongs to this flag. Of a flag that
// does not exist nothing is known; kong will complain about it.
func takesValue(model *kong.Application, word string) bool {
	name, long := strings.CutPrefix(word, "--")
	if strings.Contains(name, "=") {
		return false
	}
	for _, flag := range model.Flags {
		if long && flag.Name == name {
			return !flag.IsBool()
		}
		// The last of -qt decides; -uVALUE would not end in a flag's letter.
		if !long && flag.Short != 0 && strings.HasSuffix(word, string(flag.Short)) {
			return !flag.IsBool()
		}
	}
	return false
}

// synopsis stands in the place of kong's first line, which knows nothing of the
// payload's words.
var synopsis = map[string]string{
	"": `Usage: sbxrun [run] [flags] [--] COMMAND [ARG...]
       sbxrun doctor [--json]

Example: sbxrun --timeout 5 python3 job.py`,
	"doctor": "Usage: sbxrun doctor [--json]",
}

// Help writes the help of the whole command line, or of one command.
func Help(w io.Writer, command string) error {
	var text bytes.Buffer
	k, err := New(&CLI{}, kong.Writers(&text, &text))
	if err != nil {
		return err
	}
	ctx, err := kong.Trace(k, strings.Fields(command))
	if err != nil {
		return err
	}
	options := kong.HelpOptions{Compact: true, NoExpandSubcommands: true, WrapUpperBound: 100, ValueFormatter: withDefault}
	if err := kong.DefaultHelpPrinter(options, ctx); err != nil {
		return err
	}
	_, rest, _ := bytes.Cut(text.Bytes(), []byte("\n"))
	_, err = fmt.Fprintf(w, "%s\n%s", synopsis[command], rest)
	return err
}

// withDefault is a flag's help with its default, if that says something.
func withDefault(v *kong.Value) string {
	if v.Default == "" || v.Default == "0" || strings.Contains(v.Help, "efault") {
		return v.Help
	}
	return strings.TrimSuffix(v.Help, ".") + " (default " + v.Default + ")."
}
