package main

import (
	"context"
	"errors"
	"time"

	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/values"
)

func busyTerms(f *cli.AdmissionFlags) admission.Terms {
	return admission.Terms{OnPressure: admission.OnPressure(f.OnPressure), WaitTimeout: time.Duration(f.WaitTimeout),
		MaxParallel: int(f.MaxParallel), Warn: float64(f.Warn), Alert: float64(f.Alert)}
}

// admit waits for admission of a command. promised is the command's own limit on tasks.
func admit(ctx context.Context, f *cli.AdmissionFlags, promised values.Number, quiet bool) (*admission.Permit, error) {
	t := busyTerms(f)
	t.Promised, t.Note = int64(promised), func(text string) { warn(errors.New(text)) }
	if quiet {
		t.Note = func(string) {}
	}
	return admission.Ask(ctx, t)
}

// admit waits for admission. If a signal ends the wait, sbxrun dies of the signal.
func (c *command) admit(f *cli.AdmissionFlags, promised values.Number) (err error) {
	if c.Permit, err = admit(c.signals.ctx, f, promised, c.shared.Quiet); err != nil {
		diesOf(err)
		return err
	}
	close(c.signals.admitted)
	return nil
}
