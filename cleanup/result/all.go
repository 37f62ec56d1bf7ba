package result

import (
	"errors"
	"strings"

	"github.com/hashicorp/go-multierror"
)

// All returns the errors of steps that were all made, whatever the others came to, as
// one error in one line: nil if there is none, and a single one as it is. If one of them
// is an [*Error], so is what All returns, with the code and the hint of the first.
func All(errs ...error) error {
	all := multierror.Append(nil, errs...)
	switch len(all.Errors) {
	case 0:
		return nil
	case 1:
		return all.Errors[0]
	}
	all.ErrorFormat = inOneLine
	if e, ok := errors.AsType[*Error](all); ok {
		with := *e
		with.Message, with.Err = all.Error(), all
		return &with
	}
	return all
}

func inOneLine(errs []error) string {
	var words []string
	for _, err := range errs {
		words = append(words, err.Error())
	}
	return strings.Join(words, "; ")
}
