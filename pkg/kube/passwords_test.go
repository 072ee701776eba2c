package kube_test

import (
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

const withPassword = `
apiVersion: lodestone.io/v1alpha1
kind: Config
pools: [{name: lan, addresses: [203.0.113.0/24]}]
advertisements: [{name: tor, bgp: {}}]
peers: [{name: tor, address: 203.0.113.254, localASN: 64512, peerASN: 64513, passwordSecretRef: {name: tor}}]
`

// A peer is given another Secret by an upgrade: the document is there before the Role that allows to read the Secret, or the API
// server does not know the Secret yet. The password is not known until the next look, and nobody takes it for one that there is not.
func TestPasswordsOfAnUpgrade(t *testing.T) {
	secrets := schema.GroupResource{Resource: "secrets"}
	for name, first := range map[string]error{"forbidden": apierrors.NewForbidden(secrets, "tor", nil),
		"not there": apierrors.NewNotFound(secrets, "tor")} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := testapi.New(&corev1.ConfigMap{
					ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: config.ConfigMapName},
					Data:       map[string]string{config.Key: withPassword},
				}, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: "tor"},
					Data: map[string][]byte{"password": []byte("x")}})
				began := time.Now()
				client.PrependReactor("get", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
					return time.Since(began) < 3*time.Second, nil, first
				})
				watcher := kube.NewConfigWatcher(client, kube.ConfigOptions{Log: slog.New(slog.DiscardHandler)})
				go watcher.Run(t.Context())
				p := kube.NewPasswords(client, config.Namespace, watcher, slog.New(slog.DiscardHandler))
				go p.Run(t.Context())
				key := config.SecretKey{Name: "tor", Key: "password"}
				time.Sleep(time.Second)
				_, err := p.Password(key)
				require.ErrorIs(t, err, config.ErrNotRead)
				time.Sleep(10 * time.Second)
				value, err := p.Password(key)
				require.NoError(t, err)
				require.Equal(t, "x", value)
			})
		})
	}
}

func TestPasswordsFollowTheirSecret(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := testapi.New(&corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: config.Namespace, Name: config.ConfigMapName},
			Data:       map[string]string{config.Key: withPassword},
		})
		var down atomic.Pointer[error]
		var behind atomic.Pointer[corev1.Secret] // what an API server has that lags behind
		client.PrependReactor("get", "secrets", func(action clienttesting.Action) (bool, runtime.Object, error) {
			if err := down.Load(); err != nil {
				return true, nil, *err
			}
			if s := behind.Load(); s != nil && action.(clienttesting.GetActionImpl).GetOptions.ResourceVersion == "0" {
				return true, s, nil
			}
			return false, nil, nil
		})
		forbidden := new(error(apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "tor", nil)))
		down.Store(new(errors.New("too many requests")))
		watcher := kube.NewConfigWatcher(client, kube.ConfigOptions{Log: slog.New(slog.DiscardHandler)})
		go watcher.Run(t.Context())
		var log strings.Builder
		p := kube.NewPasswords(client, config.Namespace, watcher,
			slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
		go p.Run(t.Context())
		key := config.SecretKey{Name: "tor", Key: "password"}
		has := func(value, fault string) {
			t.Helper()
			time.Sleep(11 * time.Second)
			synctest.Wait()
			got, err := p.Password(key)
			if fault != "" {
				require.ErrorContains(t, err, fault)
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, value, got)
		}
		has("", config.ErrNotRead.Error()) // a session with the peer stays until there is an answer
		down.Store(forbidden)
		has("", config.ErrNotRead.Error()) // the Role may be on its way
		has("", "list it in the value speaker.bgp.passwordSecrets")
		down.Store(nil)
		has("", "there is no Secret lodestone-system/tor")
		secrets := client.CoreV1().Secrets(config.Namespace)
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "tor"}, Data: map[string][]byte{"passwort": []byte("x")}}
		_, err := secrets.Create(t.Context(), secret, metav1.CreateOptions{})
		require.NoError(t, err)
		has("", `Secret lodestone-system/tor has no key "password"`)

		changed := p.Changed()
		secret = secret.DeepCopy()
		secret.Data["password"] = []byte("first\n")
		_, err = secrets.Update(t.Context(), secret, metav1.UpdateOptions{})
		require.NoError(t, err)
		<-changed
		has("first", "")

		old := secret.DeepCopy()
		secret.Data["password"] = []byte("second")
		_, err = secrets.Update(t.Context(), secret, metav1.UpdateOptions{})
		require.NoError(t, err)
		has("second", "")
		behind.Store(old)
		has("second", "")
		behind.Store(nil)
		_, err = secrets.Update(t.Context(), old, metav1.UpdateOptions{})
		require.NoError(t, err)
		has("first", "")
		secret = old

		// Somebody replaces it by another one.
		require.NoError(t, secrets.Delete(t.Context(), "tor", metav1.DeleteOptions{}))
		has("first", "")
		_, err = secrets.Create(t.Context(), secret, metav1.CreateOptions{})
		require.NoError(t, err)
		has("first", "")
		require.NoError(t, secrets.Delete(t.Context(), "tor", metav1.DeleteOptions{}))
		has("first", "")
		has("", "there is no Secret lodestone-system/tor")
		_, err = secrets.Create(t.Context(), secret, metav1.CreateOptions{})
		require.NoError(t, err)
		has("first", "")

		down.Store(forbidden) // an API server that starts has not read its roles yet
		has("first", "")
		has("first", "")
		require.Empty(t, p.Outdated(key))
		time.Sleep(time.Minute) // no role allows it any more
		has("first", "")
		require.Contains(t, p.Outdated(key), "the last password stays: Secret lodestone-system/tor may not be read: list it in the value")
		down.Store(nil)
		has("first", "")
		require.Empty(t, p.Outdated(key))
		down.Store(forbidden)
		has("first", "")
		require.Empty(t, p.Outdated(key), "it is forbidden anew")
		down.Store(new(errors.New("the API server is down")))
		has("first", "")
		_, err = p.Password(config.SecretKey{Name: "other", Key: "password"})
		require.ErrorContains(t, err, "has not answered yet")
		require.Contains(t, log.String(), "Secret not read")
		require.NotContains(t, log.String(), "first")
	})
}
