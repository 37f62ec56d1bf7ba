package cli

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// ParseNames fills flags, a pointer to the struct of a command that takes names
// of sandboxes, from the words after the command's name, and returns the names.
// Both may come in any order; after -- everything is a name. An error is the
// user's.
func ParseNames[F any](flags *F, args []string) (names []string, err error) {
	k, err := New(flags)
	if err != nil {
		return nil, err
	}
	words, names, missing := separate(k.Model, args)
	if missing != "" {
		return nil, needsValue(missing)
	}
	if err := parse(k, words); err != nil {
		return nil, err
	}
	return names, checkChoices(k.Model)
}

// separate divides words in any order into flags, with their values, and names.
// Of the last flag it says whether its value is missing.
func separate(model *kong.Application, args []string) (flags, names []string, missing string) {
	for len(args) > 0 {
		word := args[0]
		n := 1
		switch {
		case word == "--":
			return flags, append(names, args[1:]...), ""
		case word == "-" || !strings.HasPrefix(word, "-"):
			names, args = append(names, word), args[1:]
			continue
		case takesValue(model, word):
			if len(args) == 1 {
				return flags, names, word
			}
			n = 2
		}
		flags, args = append(flags, args[:n]...), args[n:]
	}
	return flags, names, ""
}

// SplitExec divides what [Parse] has left of the words of exec: the name of a
// sandbox, and the command, with one -- between them or not. An error is the
// user's.
func SplitExec(words []string) (name string, command []string, err error) {
	if len(words) == 0 || words[0] == "--" {
		return "", nil, errors.New("no sandbox given")
	}
	name, command = words[0], words[1:]
	if len(command) > 0 {
		switch first := command[0]; {
		case first == "--":
			command = command[1:]
		case first != "-" && strings.HasPrefix(first, "-"):
			return "", nil, fmt.Errorf("%s: flags come before the sandbox; a command of such a name comes after --", first)
		}
	}
	if len(command) == 0 {
		return "", nil, errors.New("no command given")
	}
	return name, command, nil
}

// Choices are the values of a flag whose placeholder names them, as none|host
// does.
func Choices(flag *kong.Flag) []string {
	if p := flag.PlaceHolder; strings.Contains(p, "|") && p == strings.ToLower(p) {
		return strings.Split(p, "|")
	}
	return nil
}

// checkChoices refuses a value that its flag's placeholder does not name.
func checkChoices(model *kong.Application) error {
	for _, flag := range model.Flags {
		choices := Choices(flag)
		if choices == nil || !flag.Set {
			continue
		}
		given := []string{flag.Target.String()}
		if flag.Target.Kind() == reflect.Slice {
			given = flag.Target.Interface().([]string)
		}
		for _, value := range given {
			if !slices.Contains(choices, value) {
				last := len(choices) - 1
				return fmt.Errorf("--%s %q: want %s or %s", flag.Name, value, strings.Join(choices[:last], ", "), choices[last])
			}
		}
	}
	return nil
}
