package objects

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// wrapped returns the list as API servers send it.
func wrapped(t testing.TB, list *corev1.NamespaceList) []byte {
	t.Helper()
	raw, err := list.Marshal()
	require.NoError(t, err)
	whole, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "NamespaceList"}, Raw: raw}).Marshal()
	require.NoError(t, err)
	return append(bytes.Clone(magic), whole...)
}

// decoded reads a list of Namespaces.
func decoded(body []byte) (*corev1.NamespaceList, error) {
	list := &corev1.NamespaceList{}
	head, err := decode(bytes.NewReader(body), func(data []byte) error {
		list.Items = append(list.Items, corev1.Namespace{})
		return list.Items[len(list.Items)-1].Unmarshal(data)
	})
	list.ListMeta = head
	return list, err
}

// A list states the lengths of its parts. Memory is used for the parts that are there, not for stated lengths, and
// whatever is read is read again in the same way once it is written.
func FuzzDecode(f *testing.F) {
	list := &corev1.NamespaceList{ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: "c"}}
	f.Add(wrapped(f, list))
	for _, name := range []string{"shop", "tenant"} {
		list.Items = append(list.Items, corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"a": "b"}}})
	}
	whole := wrapped(f, list)
	f.Add(whole)
	f.Add(whole[:len(whole)-9])
	for _, length := range []uint64{maxObject, maxObject + 1, 1 << 40, 1 << 63} { // of an object that is not there
		raw := binary.AppendUvarint([]byte{listItems<<3 | 2}, length)
		f.Add(append(append(bytes.Clone(magic), unknownRaw<<3|2, byte(len(raw))), raw...))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var list *corev1.NamespaceList
		var err error
		testcost.Within(t, "a list", len(body), func() { list, err = decoded(body) })
		if err != nil {
			return
		}
		again, err := decoded(wrapped(t, list))
		require.NoError(t, err)
		require.Equal(t, list, again)
	})
}
