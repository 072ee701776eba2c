// Package cgroup keeps everything the lab starts in one control group, so that
// one write ends it all, whatever a killed run forgot to record.
//
// Processes are put in the group of the v2 hierarchy as they are cloned.
// Machines that still have v1 hierarchies get a group of the same name in each,
// because there kubelet keeps its pods.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Group is the name of a lab's control group.
type Group string

const (
	mount = "/sys/fs/cgroup"
	// members is the child that holds the processes the lab starts itself:
	// a v2 group with children may not have members.
	members = "members"
)

// NodeRoot is the path of a node's pods below every hierarchy's mount point,
// what kubelet calls its cgroupRoot.
func (g Group) NodeRoot(node string) string { return "/" + string(g) + "/" + node }

// v2 returns the mount point of the version 2 hierarchy.
func v2() string {
	if hybrid := filepath.Join(mount, "unified"); exists(hybrid) {
		return hybrid
	}
	return mount
}

// v1 returns the mount points of the version 1 hierarchies, if there are any.
func v1() ([]string, error) {
	if v2() == mount {
		return nil, nil
	}
	entries, err := os.ReadDir(mount)
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	var mounts []string
	for _, entry := range entries {
		if entry.IsDir() && entry.Name() != "unified" {
			mounts = append(mounts, filepath.Join(mount, entry.Name()))
		}
	}
	return mounts, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Create makes the lab's group and one below it for each node's pods.
func (g Group) Create(nodes []string) error {
	root := filepath.Join(v2(), string(g))
	if err := os.MkdirAll(filepath.Join(root, members), 0o755); err != nil {
		return fmt.Errorf("create cgroup: %w", err)
	}
	hierarchies, err := v1()
	if err != nil {
		return err
	}
	if len(hierarchies) == 0 {
		for _, path := range []string{mount, root} { // systemd leaves out what none of its services needs
			if err := delegate(path); err != nil {
				return err
			}
		}
		hierarchies = []string{mount}
	}
	for _, hierarchy := range hierarchies {
		for _, node := range nodes {
			if err := createBelow(hierarchy, g.NodeRoot(node)); err != nil {
				return fmt.Errorf("create cgroup of node %s: %w", node, err)
			}
		}
	}
	return nil
}

// kubelet starts only where its pods can have these controllers, if the kernel has them.
var needed = []string{"cpu", "cpuset", "hugetlb", "memory", "pids"}

// delegate hands the controllers of a v2 group that kubelets need on to its children.
func delegate(path string) error {
	raw, err := os.ReadFile(filepath.Join(path, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("read cgroup controllers: %w", err)
	}
	for _, controller := range strings.Fields(string(raw)) {
		if !slices.Contains(needed, controller) {
			continue
		}
		if err := os.WriteFile(filepath.Join(path, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
			return fmt.Errorf("delegate cgroup controller %s: %w", controller, err)
		}
	}
	return nil
}

// createBelow makes path below the hierarchy, one level at a time: a new v1
// cpuset is empty and of no use until it has its parent's CPUs and memory.
func createBelow(hierarchy, path string) error {
	parent := hierarchy
	for _, level := range strings.Split(strings.Trim(path, "/"), "/") {
		child := filepath.Join(parent, level)
		if err := os.MkdirAll(child, 0o755); err != nil {
			return err
		}
		if filepath.Base(hierarchy) == "cpuset" {
			if err := inherit(parent, child, "cpuset.cpus", "cpuset.mems"); err != nil {
				return err
			}
		}
		parent = child
	}
	return nil
}

func inherit(parent, child string, files ...string) error {
	for _, file := range files {
		value, err := os.ReadFile(filepath.Join(parent, file))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(child, file), value, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// Open returns the directory of the lab's group for SysProcAttr.CgroupFD.
func (g Group) Open() (*os.File, error) {
	file, err := os.Open(filepath.Join(v2(), string(g), members))
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	return file, nil
}

// Destroy kills every process of the lab and removes its groups.
func (g Group) Destroy(ctx context.Context) error {
	hierarchies, err := v1()
	if err != nil {
		return err
	}
	for _, hierarchy := range append(hierarchies, v2()) {
		if err := destroyTree(ctx, filepath.Join(hierarchy, string(g))); err != nil {
			return fmt.Errorf("destroy cgroup: %w", err)
		}
	}
	return nil
}

func destroyTree(ctx context.Context, root string) error {
	for {
		err := killAndRemove(root)
		if err == nil || !errors.Is(err, unix.EBUSY) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func killAndRemove(root string) error {
	if !exists(root) {
		return nil
	}
	if err := kill(root); err != nil {
		return err
	}
	groups, err := tree(root)
	if err != nil {
		return err
	}
	slices.Reverse(groups) // children first
	for _, path := range groups {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// kill ends all processes of the tree: at once where the kernel can (v2), one
// by one otherwise.
func kill(root string) error {
	if all := filepath.Join(root, "cgroup.kill"); exists(all) {
		return os.WriteFile(all, []byte("1"), 0o644)
	}
	pids, err := PIDs(root)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("kill process %d: %w", pid, err)
		}
	}
	return nil
}

// PIDs lists the processes of a group and of every group below it.
func PIDs(root string) ([]int, error) {
	groups, err := tree(root)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, path := range groups {
		raw, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		for _, field := range strings.Fields(string(raw)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", path, err)
			}
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// ContainerPIDs lists the processes of one container of a node.
func (g Group) ContainerPIDs(node, container string) ([]int, error) {
	hierarchy := v2()
	if hierarchy != mount {
		hierarchy = filepath.Join(mount, "pids")
	}
	groups, err := tree(filepath.Join(hierarchy, g.NodeRoot(node)))
	if err != nil {
		return nil, err
	}
	for _, path := range groups {
		if filepath.Base(path) == container {
			return PIDs(path)
		}
	}
	return nil, fmt.Errorf("find container %s of node %s: no such cgroup", container, node)
}

// tree lists root and the groups below it, parents first.
func tree(root string) ([]string, error) {
	var groups []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && entry.IsDir() {
			groups = append(groups, path)
		}
		return err
	})
	return groups, err
}
