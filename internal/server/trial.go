package server

import (
	"context"
	"errors"
	"maps"
	"os/exec"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cells"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// TryLanguages offers only languages whose command runs in a sandbox, now and after each reload. Before it is
// called, the server offers those whose command is in its own PATH, which sandboxes may not see.
func (s *Server) TryLanguages() {
	s.works = s.runs
	set := *s.settings.Load()
	set.languages = s.working(&set)
	s.settings.Store(&set)
}

// working returns the languages that work.
func (s *Middleware) working(set *settings) map[string]cells.Language {
	all := set.Config.Languages
	works := s.works
	if works == nil {
		works = func(_ slot.Policy, l cells.Language) bool { return l.Image != "" || inPath(l) }
	}
	found := maps.Clone(all)
	var mu sync.Mutex
	var trials sync.WaitGroup
	for name, l := range all {
		trials.Go(func() {
			if !works(set.policyOf(set.images[l.Image]), l) {
				mu.Lock()
				defer mu.Unlock()
				delete(found, name)
			}
		})
	}
	trials.Wait()
	return found
}

func inPath(l cells.Language) bool {
	_, err := exec.LookPath(l.Command[0])
	return err == nil
}

// runs starts the command of a language in a sandbox, without arguments and input. If no sandbox can be
// created, all languages fail in the same way: the server's PATH decides then, and languages of images are offered.
func (s *Server) runs(policy slot.Policy, l cells.Language) (works bool) {
	const within = 10 * time.Second
	ctx, cancel := context.WithTimeout(s.base, within)
	defer cancel()
	works = l.Image != "" || inPath(l)
	_ = s.Recover(ctx, func() error { // logged
		at, err := s.source.Take(ctx, "", policy)
		if err != nil {
			return nil
		}
		defer at.Give() // the command's verdict does not matter here
		run, err := at.Start(ctx, slot.Command{Args: l.Command[:1], Options: supervise.Options{Timeout: within}})
		if e := (*result.Error)(nil); errors.As(err, &e) {
			works = works && e.Code != "not-found" && e.Code != "not-executable"
		}
		if err != nil {
			return nil
		}
		const notExecutable, notFound = 126, 127 // from a shell script that starts the interpreter
		if res, _ := run.Wait(); res != nil && ctx.Err() == nil {
			works = res.Started && res.ExitCode() != notExecutable && res.ExitCode() != notFound
		}
		return nil
	})
	return works
}
