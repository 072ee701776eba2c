# docker build --target controller --build-arg VERSION=v0.1.0 --tag lodestone-controller:v0.1.0 .
# docker build --target speaker    --build-arg VERSION=v0.1.0 --tag lodestone-speaker:v0.1.0 .
# docker build --target cli        --build-arg VERSION=v0.1.0 --tag lodestone:v0.1.0 .
#
# The same files as in the images of make release come out with its version and the commit that it is of:
# --build-arg COMMIT=$(git rev-parse HEAD) --build-arg DATE=$(git log -1 --format=%cI)
#
# An image is one static binary and nothing else. Nothing of the image that builds it gets in but
# what its compiler writes; to build with one that you have verified, name it by its digest:
# --build-arg GO_IMAGE=golang:1.26@sha256:...
#
# Podman 4.3, which is Debian 12's, leaves BUILDPLATFORM empty, and with another --platform than the machine's
# would build in emulation: add --build-arg BUILDPLATFORM=linux/amd64, which is the machine's.
ARG GO_IMAGE=golang:1.26

FROM --platform=$BUILDPLATFORM $GO_IMAGE AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETOS TARGETARCH
ARG VERSION=dev COMMIT=unknown DATE=unknown
RUN GOOS=$TARGETOS GOARCH=$TARGETARCH make build VERSION=$VERSION COMMIT=$COMMIT DATE=$DATE

FROM scratch AS cli
COPY --from=build /src/bin/lodestone /lodestone
USER 65532:65532
ENTRYPOINT ["/lodestone"]

FROM scratch AS controller
COPY --from=build /src/bin/lodestone-controller /lodestone-controller
USER 65532:65532
ENTRYPOINT ["/lodestone-controller"]

# Root with no capability but the NET_RAW that the chart adds: Kubernetes gives
# added capabilities to processes of uid 0 only. A file capability on the binary
# would lift that, but it is lost in copies of the image that drop extended
# attributes, and has no effect under allowPrivilegeEscalation: false.
FROM scratch AS speaker
COPY --from=build /src/bin/lodestone-speaker /lodestone-speaker
USER 0:0
ENTRYPOINT ["/lodestone-speaker"]
