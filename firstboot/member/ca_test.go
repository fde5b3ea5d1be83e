package member_test

import (
	"bytes"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// TestWorkerTakesTheCAThatWasIssuedAgain checks that a worker accepts a CA with the same key from
// cluster-info, even from an unauthenticated server. The node still boots after the former CA has
// expired.
func TestWorkerTakesTheCAThatWasIssuedAgain(t *testing.T) {
	t.Parallel()
	for name, newWorld := range map[string]func(*testing.T, ...string) *worldtest.World{"native": nativeWorld, "edge": edgeWorld} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.MustBoot()
			former := w.Get(ondisk.KubeCA)
			w.YearsLater(7)
			w.MustBoot()
			if w.ConsoleHas("is valid until") || w.Get(ondisk.KubeCA) != former {
				t.Errorf("the CA was reported or replaced too early\n%s", strings.Join(w.Console, "\n"))
			}
			w.YearsLater(2)
			w.MustBoot()
			if !w.ConsoleHas(ondisk.KubeCA+" is valid until 2036-11-20") || w.Units[ondisk.UnitAgain] != "active" {
				t.Errorf("the console does not report the end of the CA, or first boot's timer is %s\n%s", w.Units[ondisk.UnitAgain], strings.Join(w.Console, "\n"))
			}

			stranger, strangersKey := worldtest.NewCA(t, "kubernetes")
			ca, own := w.Cluster.CA, w.Cluster.CAPEM
			forged := *ca
			forged.NotAfter = w.Now.AddDate(10, 0, 0)
			der, err := x509.CreateCertificate(rand.Reader, &forged, stranger, ca.PublicKey, strangersKey)
			if err != nil {
				t.Fatal(err)
			}
			w.Cluster.CAPEM = append(worldtest.Reissue(t, stranger, strangersKey, w.Now), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
			w.MustBoot()
			if w.Get(ondisk.KubeCA) != former {
				t.Fatal("the machine accepted a CA that is not the cluster's")
			}
			w.Cluster.CAPEM = own

			renewed := worldtest.Reissue(t, ca, w.Cluster.Key, w.Now)
			w.Cluster.CAPEM = renewed
			w.EffectNames = nil
			w.MustBoot() // as firstboot-again.timer does
			if w.Get(ondisk.KubeCA) != string(renewed) || !bytes.Equal(worldtest.CAOf(t, w.Get(ondisk.KubeletConf)), renewed) {
				t.Error("the kubeconfig trusts the old CA")
			}
			if !slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) || name == "edge" && !slices.Contains(w.EffectNames, "restart "+openyurt.Unit) {
				t.Errorf("the programs were not restarted: %q", w.EffectNames)
			}
			if w.Units[ondisk.UnitAgain] == "active" {
				t.Error("first boot's timer is still active")
			}
			w.EffectNames = nil
			w.MustBoot()
			if slices.Contains(w.EffectNames, "restart "+ondisk.UnitKubelet) {
				t.Errorf("kubelet was restarted again: %q", w.EffectNames)
			}
			w.YearsLater(3) // the former CA has expired
			w.Cluster.TLS.ClientCAs.AppendCertsFromPEM(renewed)
			w.MustBoot()
		})
	}
}

// TestWorkerThatMissedTheEndOfTheCA checks that a worker that was off when the former CA expired
// accepts the reissued one.
func TestWorkerThatMissedTheEndOfTheCA(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.YearsLater(11)
	w.Cluster.CAPEM = worldtest.Reissue(t, w.Cluster.CA, w.Cluster.Key, w.Now.AddDate(-2, 0, 0))
	w.Cluster.TLS.ClientCAs.AppendCertsFromPEM(w.Cluster.CAPEM)
	w.MustBoot()
}
