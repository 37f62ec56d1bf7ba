package proxy

import (
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"strings"
	"testing"
)

// echConfigs is an ECHConfigList (RFC 9849, 4) for servers that are called so in the clear.
func echConfigs(t *testing.T, publicName string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	u16 := binary.BigEndian.AppendUint16
	public := key.PublicKey().Bytes()
	c := append(u16(u16([]byte{1}, 0x20), uint16(len(public))), public...) // config_id, DHKEM(X25519, HKDF-SHA256)
	c = u16(u16(u16(c, 4), 1), 1)                                          // HKDF-SHA256, AES-128-GCM
	c = u16(append(append(c, 0, byte(len(publicName))), publicName...), 0)
	c = append(u16(u16(nil, extensionECH), uint16(len(c))), c...)
	return append(u16(nil, uint16(len(c))), c...)
}

// TestHello: a tunnel to a name is for TLS with that name, in the clear. crypto/tls writes what is
// looked at.
func TestHello(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		to, name string
		ech      bool
		want     string // the refusal
	}{
		{to: "www.example.org:443", name: "www.example.org"},
		{to: "www.example.org:443", name: "other.example.org", want: "is another: other.example.org"},
		{to: "www.example.org:443", want: "without a server name"},
		{to: "www.example.org:443", name: "other.example.org", ech: true, want: "is encrypted"},
		{to: "192.0.2.1:443", name: "other.example.org", ech: true},
		{to: "192.0.2.1:443"},
	} {
		config := &tls.Config{ServerName: tt.name, InsecureSkipVerify: tt.name == ""}
		if tt.ech {
			config.EncryptedClientHelloConfigList = echConfigs(t, "www.example.org")
		}
		client, server := tcpPair(t)
		over := make(chan error)
		go func() { over <- tls.Client(client, config).Handshake() }()
		to, _ := parseTarget(tt.to, 0)
		read, err := checkHello(server, nil, to)
		if err == nil && tt.want != "" || err != nil && (tt.want == "" || !is[refusal](err) || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%+v: %v", tt, err)
		}
		if kind, sure := classify(read); kind != kindTLS || !sure {
			t.Errorf("%+v: what it begins with is taken for %d, %v", tt, kind, sure)
		}
		server.Close()
		if <-over == nil {
			t.Errorf("%+v: there was a server", tt)
		}
	}
}
