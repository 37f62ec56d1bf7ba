package cluster

import (
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/internal/config"
)

// NATS is a [Bus], with subjects that begin with the name of the cluster.
type NATS struct {
	*nats.Conn
	prefix string
	leases *leaseStore
	queue  *queue
	quotas *bucket
	outage *outage
}

// outage logs why NATS is unreachable, at most every ten seconds, because there are several attempts per
// second.
type outage struct {
	log   *slog.Logger
	where string
	mu    sync.Mutex
	err   error
	said  time.Time
}

func (a *outage) failed(_ *nats.Conn, err error) {
	const again = 10 * time.Second
	if errors.Is(err, nats.ErrNoServers) { // sums up the errors of all addresses, which follow
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if time.Since(a.said) > again {
		a.log.Warn("NATS", "error", "cannot connect: "+err.Error(), "url", a.where)
		a.said = time.Now()
	}
	a.err = err
}

func (a *outage) why() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err == nil {
		return fmt.Errorf("NATS at %s does not respond", a.where)
	}
	return fmt.Errorf("NATS at %s does not respond: %w", a.where, a.err)
}

// Connect connects to NATS, and keeps trying in the background if it is unreachable: a node continues
// without it. Responses to a node arrive below its own subject, which others cannot read.
func Connect(all *config.Config, kind string, log *slog.Logger) (*NATS, error) {
	c := &all.NATS
	const (
		wait  = 250 * time.Millisecond // between attempts
		pings = 750 * time.Millisecond // two unanswered pings close the connection, well before [lostAfter], so that a silent server does not make its clients count as lost
		dials = 2 * time.Second
		write = time.Second // a slow write blocks everything else, including pings
	)
	why := &outage{log: log, where: redacted(c.URL)}
	options := []nats.Option{
		nats.ReconnectErrHandler(why.failed),
		nats.Name("sbxrun " + kind + " " + c.Name()), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true), nats.ReconnectWait(wait), nats.ReconnectJitter(wait, wait),
		nats.PingInterval(pings), nats.MaxPingsOutstanding(2), nats.Timeout(dials), nats.FlusherTimeout(write), nats.ReconnectOnFlusherError(),
		nats.ReconnectBufSize(-1), // Conn sends lost data again; NATS must not send it twice
		nats.ConnectHandler(func(nc *nats.Conn) { log.Info("NATS", "connected", nc.ConnectedUrlRedacted()) }),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("NATS", "connected", nc.ConnectedUrlRedacted()) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("NATS", "error", err.Error())
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, s *nats.Subscription, err error) {
			subject := ""
			if s != nil {
				subject = s.Subject
			}
			log.Warn("NATS", "error", err.Error(), "subject", subject)
		}),
	}
	if kind == NodeKind {
		options = append(options, nats.CustomInboxPrefix(c.Cluster+"."+kind+"."+c.Name()+".inbox"))
	}
	if c.Creds != "" {
		options = append(options, nats.UserCredentials(c.Creds))
	}
	if c.CA != "" {
		options = append(options, nats.RootCAs(c.CA))
	}
	if c.Cert != "" {
		options = append(options, nats.ClientCert(c.Cert, c.Key))
	}
	nc, err := nats.Connect(c.URL, options...)
	if err != nil {
		return nil, fmt.Errorf("NATS at %s: %w", why.where, err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	keys := &leaseStore{bucket{js: js, name: c.Cluster + "-keys", ttl: leaseTTL + renewInterval, most: 2 * maxAnswer, replicas: c.Replicas}}
	return &NATS{nc, c.Cluster + ".", keys, newQueue(js, all), &bucket{js: js, name: c.Cluster + "-shares", most: maxQuotaRecord, replicas: c.Replicas}, why}, nil
}

// redacted returns a list of addresses without passwords.
func redacted(list string) string {
	all := strings.Split(list, ",")
	for i, one := range all {
		if !strings.Contains(one, "://") {
			one = "nats://" + one
		}
		if u, err := url.Parse(one); err == nil {
			all[i] = u.Redacted()
		}
	}
	return strings.Join(all, ",")
}

// Why returns the last connection error.
func (b *NATS) Why() error { return b.outage.why() }

func (b *NATS) Publish(subject, reply string, data []byte) error {
	if !b.IsConnected() {
		return errors.New("not connected to NATS")
	}
	if reply == "" {
		return b.Conn.Publish(b.prefix+subject, data)
	}
	return b.PublishRequest(b.prefix+subject, b.prefix+reply, data)
}

func (b *NATS) Close() {
	const most = 2 * time.Second
	if b.Drain() == nil { // fails if it is not connected
		for end := time.Now().Add(most); !b.IsClosed() && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}
	b.Conn.Close()
}

func (b *NATS) Connected() bool    { return b.IsConnected() }
func (b *NATS) Reconnects() uint64 { return b.Stats().Reconnects }

func (b *NATS) Subscribe(subject string, each func(subject, reply string, data []byte, nobody bool)) error {
	s, err := b.Conn.Subscribe(b.prefix+subject, func(m *nats.Msg) {
		const noResponders = "503"
		each(strings.TrimPrefix(m.Subject, b.prefix), strings.TrimPrefix(m.Reply, b.prefix), m.Data, len(m.Data) == 0 && m.Header.Get("Status") == noResponders)
	})
	if err != nil {
		return err
	}
	return s.SetPendingLimits(-1, -1) // windows bound the pending data
}
