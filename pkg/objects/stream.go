package objects

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// maxObject bounds an object on the wire; etcd takes 1.5 MiB, unless it is configured to take
// more.
const maxObject = 16 << 20

// stream lists the objects as the API server sends them, and keeps one at a time.
func (k Kind[E, P]) stream(ctx context.Context, c *rest.RESTClient, scope Scope, o metav1.ListOptions,
	each func(P)) (head metav1.ListMeta, err error) {
	o = scope.options(o)
	body, err := c.Get().NamespaceIfScoped(scope.Namespace, scope.Namespace != "").Resource(k.Resource).
		VersionedParams(&o, scheme.ParameterCodec).SetHeader("Accept", runtime.ContentTypeProtobuf).Stream(ctx)
	if err != nil {
		return head, err
	}
	defer func() { err = errors.Join(err, body.Close()) }()
	return decode(body, func(data []byte) error {
		obj := P(new(E))
		if err := obj.Unmarshal(data); err != nil {
			return err
		}
		each(obj)
		return nil
	})
}

// magic begins what Kubernetes encodes as protobuf.
var magic = []byte{'k', '8', 's', 0}

// Field numbers of runtime.Unknown, which wraps every object, and of every list.
const (
	unknownRaw   = 2
	listMetadata = 1
	listItems    = 2
)

// decode reads a list of objects in Kubernetes' protobuf encoding and hands over
// the encoding of each, which is valid until the function returns.
func decode(body io.Reader, each func(data []byte) error) (head metav1.ListMeta, err error) {
	in := bufio.NewReaderSize(body, 64<<10)
	prefix := make([]byte, len(magic))
	if _, err := io.ReadFull(in, prefix); err != nil {
		return head, fmt.Errorf("read the list: %w", whole(err))
	}
	if !bytes.Equal(prefix, magic) {
		return head, fmt.Errorf("read the list: it begins with %q, and not as protobuf of Kubernetes does", prefix)
	}
	var buffer bytes.Buffer // it grows with what comes, whatever length is announced
	err = fields(in, func(number, length uint64) error {
		if number != unknownRaw {
			return skip(in, length)
		}
		raw := &io.LimitedReader{R: in, N: int64(length)}
		return fields(byteReader{raw}, func(number, length uint64) error {
			if number != listMetadata && number != listItems {
				return skip(raw, length)
			}
			if length > maxObject {
				return fmt.Errorf("an object has %d bytes, more than %d", length, maxObject)
			}
			buffer.Reset()
			if _, err := io.CopyN(&buffer, raw, int64(length)); err != nil {
				return whole(err)
			}
			if number == listMetadata {
				return head.Unmarshal(buffer.Bytes())
			}
			return each(buffer.Bytes())
		})
	})
	if err != nil {
		return head, fmt.Errorf("read the list: %w", err)
	}
	if head.ResourceVersion == "" {
		return head, errors.New("read the list: it has no version")
	}
	return head, nil
}

// fields hands over the number and the length of each field of a message, up to
// its end. Of a field of another type than bytes the length is 0.
func fields(in interface {
	io.Reader
	io.ByteReader
}, field func(number, length uint64) error) error {
	const varint, fixed64, delimited, fixed32 = 0, 1, 2, 5
	for {
		tag, err := binary.ReadUvarint(in)
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var length uint64
		switch tag & 7 {
		case varint:
			_, err = binary.ReadUvarint(in)
			err = whole(err)
		case fixed64:
			err = skip(in, 8)
		case fixed32:
			err = skip(in, 4)
		case delimited:
			length, err = binary.ReadUvarint(in)
			if err == nil && length > math.MaxInt64 {
				err = fmt.Errorf("field %d has %d bytes", tag>>3, length)
			}
			if err == nil {
				err = field(tag>>3, length)
			}
			err = whole(err)
		default:
			err = fmt.Errorf("field %d has wire type %d", tag>>3, tag&7)
		}
		if err != nil {
			return err
		}
	}
}

func skip(in io.Reader, length uint64) error {
	_, err := io.CopyN(io.Discard, in, int64(length))
	return whole(err)
}

// whole turns an end of the data that comes too early into an error.
func whole(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// byteReader reads single bytes of what is buffered below it.
type byteReader struct{ *io.LimitedReader }

func (r byteReader) ReadByte() (byte, error) {
	if r.N <= 0 {
		return 0, io.EOF
	}
	b, err := r.R.(io.ByteReader).ReadByte()
	if err == nil {
		r.N--
	} else {
		err = whole(err)
	}
	return b, err
}
