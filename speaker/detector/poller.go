package detector

import (
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// alarm is a clock of the kernel and a socket, in one descriptor that Go's runtime waits for. With a timer of Go's instead, the
// thread that sets it wakes the one that waits for descriptors, each time.
type alarm struct {
	clock, epoll int
	file         *os.File // of epoll
	conn         syscall.RawConn
}

func newAlarm(socket int) (*alarm, error) {
	clock, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		_ = unix.Close(clock)
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	a := &alarm{clock: clock, epoll: epoll}
	err = unix.SetNonblock(epoll, true) // os.NewFile has the runtime wait for such files alone
	for _, fd := range []int{clock, socket} {
		if err == nil {
			err = os.NewSyscallError("epoll_ctl", unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}))
		}
	}
	a.file = os.NewFile(uintptr(epoll), "heartbeats")
	if err == nil {
		a.conn, err = a.file.SyscallConn()
	}
	if err != nil {
		a.close()
		return nil, err
	}
	return a, nil
}

// wait waits until that time, or until the socket has a packet.
func (a *alarm) wait(deadline time.Time) error {
	at := unix.ItimerSpec{Value: unix.NsecToTimespec(max(1, time.Until(deadline).Nanoseconds()))}
	err := unix.TimerfdSettime(a.clock, 0, &at, nil)
	if err == nil {
		err = a.conn.Read(func(uintptr) bool {
			var event unix.EpollEvent
			n, err := raw(unix.SYS_EPOLL_PWAIT, a.epoll, unsafe.Pointer(&event), 1, 0, nil, 0)
			return n != 0 || err != 0
		})
	}
	if err != nil {
		return fmt.Errorf("wait for heartbeats: %w", err)
	}
	return nil
}

func (a *alarm) close() {
	_ = unix.Close(a.clock)
	_ = a.file.Close()
}
