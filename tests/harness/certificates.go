package harness

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Certificates creates a certificate authority and a certificate for 127.0.0.1: the files ca.pem, server.pem and
// server.key in a directory.
func Certificates(t T) (dir string) {
	t.Helper()
	dir = Dir(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check.Must(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	check.Must(t, err)
	write := func(name, kind string, der []byte) {
		check.Must(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	}
	until := time.Now().Add(time.Hour)
	authority := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotAfter: until,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, authority, authority, &key.PublicKey, key)
	check.Must(t, err)
	authority, err = x509.ParseCertificate(der)
	check.Must(t, err)
	write("ca.pem", "CERTIFICATE", der)
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: until, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err = x509.CreateCertificate(rand.Reader, leaf, authority, &key.PublicKey, key)
	check.Must(t, err)
	write("server.pem", "CERTIFICATE", der)
	write("server.key", "PRIVATE KEY", private)
	return dir
}
