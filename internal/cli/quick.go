package cli

import (
	"encoding"
	"reflect"
	"strings"
)

// quick reads a command line in which nothing is wrong, without kong,
// which takes half a millisecond to build its model of the flags: a tenth of a
// run. It knows the flags by the same struct tags. Whatever it does not
// understand, an error first of all, it leaves to kong, which words it; that
// both agree on the rest is a test. (But for values that are not UTF-8: kong
// replaces their bytes in a list, and a path has to stay what it is.)
func quick(flags any, args []string) (payload []string, ok bool) {
	v := reflect.ValueOf(flags).Elem()
	given := map[string]bool{}
	for len(args) > 0 {
		word := args[0]
		if word == "--" {
			args = args[1:]
			break
		}
		if word == "-" || !strings.HasPrefix(word, "-") {
			break
		}
		name, isLong := strings.CutPrefix(word, "--")
		if !isLong {
			if !setShort(v, word[1:]) {
				return nil, false
			}
			args = args[1:]
			continue
		}
		name, value, hasValue := strings.Cut(name, "=")
		field, tag, found := fieldOf(v, name)
		if _, excludes := tag.Lookup("xor"); !found || excludes {
			return nil, false // what it does not go with is kong's to know
		}
		args = args[1:]
		if field.Kind() == reflect.Bool {
			if hasValue {
				return nil, false
			}
			field.SetBool(true)
			continue
		}
		if !hasValue {
			if len(args) == 0 || strings.HasPrefix(args[0], "-") {
				return nil, false // missing, or looks like a flag: kong decides
			}
			value, args = args[0], args[1:]
		}
		if !set(field, value) {
			return nil, false
		}
		given[name] = true
	}
	return args, setDefaults(v, given)
}

// setDefaults fills in what was not given.
func setDefaults(v reflect.Value, given map[string]bool) bool {
	t := v.Type()
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Anonymous {
			if !setDefaults(v.Field(i), given) {
				return false
			}
			continue
		}
		if def, has := f.Tag.Lookup("default"); has && !given[flagName(f)] && !set(v.Field(i), def) {
			return false
		}
	}
	return true
}

// setShort sets the switches of a word such as -qt.
func setShort(v reflect.Value, letters string) bool {
	for _, letter := range letters {
		field, found := shortOf(v, string(letter))
		if !found || field.Kind() != reflect.Bool {
			return false
		}
		field.SetBool(true)
	}
	return true
}

func shortOf(v reflect.Value, letter string) (reflect.Value, bool) {
	t := v.Type()
	for i := range t.NumField() {
		if t.Field(i).Anonymous {
			if field, found := shortOf(v.Field(i), letter); found {
				return field, true
			}
		} else if t.Field(i).Tag.Get("short") == letter {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

func fieldOf(v reflect.Value, name string) (field reflect.Value, tag reflect.StructTag, found bool) {
	t := v.Type()
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Anonymous {
			if field, tag, found := fieldOf(v.Field(i), name); found {
				return field, tag, true
			}
		} else if flagName(f) == name {
			return v.Field(i), f.Tag, true
		}
	}
	return reflect.Value{}, "", false
}

// flagName is the flag of a field: RoBindTry is ro-bind-try, JSON is json; or what its
// tag says.
func flagName(f reflect.StructField) string {
	if name := f.Tag.Get("name"); name != "" {
		return name
	}
	field := f.Name
	var b strings.Builder
	for i, c := range []byte(field) {
		upper := c >= 'A' && c <= 'Z'
		if upper && i > 0 && field[i-1] >= 'a' {
			b.WriteByte('-')
		}
		if upper {
			c += 'a' - 'A'
		}
		b.WriteByte(c)
	}
	return b.String()
}

func set(field reflect.Value, value string) bool {
	if u, ok := field.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return u.UnmarshalText([]byte(value)) == nil
	}
	switch field.Kind() {
	case reflect.String:
		field.SetString(value)
	case reflect.Slice:
		field.Set(reflect.Append(field, reflect.ValueOf(value)))
	default:
		return false
	}
	return true
}
