// Package testapi has client-go's fake client as an API server in memory, for tests.
package testapi

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
)

// New returns a client of an API server that has the objects. It keeps no managed fields, which only server-side apply
// needs: they would take most of a test's time, since each write builds a mapper of all kinds.
func New(objects ...runtime.Object) *fake.Clientset {
	return fake.NewSimpleClientset(objects...) //nolint:staticcheck // nobody applies objects
}
