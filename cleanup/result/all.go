package result

import (
	"errors"
	"strings"

	"github.com/hashicorp/go-multierror"
)

// All joins the errors of several steps into a one-line error. It returns nil if there are none, and a single error
// unchanged. If one of them is an [*Error], so is the result, with the code and the hint of the first.
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
