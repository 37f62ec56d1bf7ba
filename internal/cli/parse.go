package cli

import (
	"errors"
	"fmt"
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
		return nil, needsValue(words[n-1])
	}
	if err := parse(k, words); err != nil {
		return nil, err
	}
	return payload, nil
}

// needsValue says what kong says in words that are hard to read.
func needsValue(flag string) error { return fmt.Errorf("%s: needs a value", flag) }

// parse parses flags, and nothing but flags.
func parse(k *kong.Kong, words []string) error {
	words, err := joinNegative(k.Model, words)
	if err != nil {
		return err
	}
	_, err = k.Parse(words)
	var p *kong.ParseError
	if errors.As(err, &p) {
		return p.Unwrap()
	}
	return err
}

// joinNegative joins a flag and a negative number, which kong would take for a flag. Another
// word that begins with - is no value; kong's words for that are hard to read.
func joinNegative(model *kong.Application, words []string) (out []string, err error) {
	for i := 0; i < len(words); i++ {
		word := words[i]
		if i+1 < len(words) && strings.HasPrefix(words[i+1], "-") && words[i+1] != "-" && takesValue(model, word) {
			i++
			next := words[i]
			if next == "--" || !strings.HasPrefix(word, "--") || strings.Trim(next[1:2], "0123456789.") != "" {
				return nil, fmt.Errorf("%s: needs a value, and %q looks like a flag; if it is the value, write %s=%s", word, next, word, next)
			}
			word += "=" + next
		}
		out = append(out, word)
	}
	return out, nil
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
