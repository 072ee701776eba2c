{{/* Labels of every object; "component" names its component. Pods get only those that select
them: a new version of the chart alone must not restart a speaker. */}}
{{- define "lodestone.labels" -}}
{{ include "lodestone.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels that select a component's pods. */}}
{{- define "lodestone.selector" -}}
app.kubernetes.io/name: lodestone
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Image of a component; its values are the argument "values". */}}
{{- define "lodestone.image" -}}
{{ .root.Values.image.registry }}/{{ .values.repository }}{{ with .values.digest }}@{{ . }}{{ else }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "lodestone.ownConfigMap" -}}
lodestone-config
{{- end }}

{{- define "lodestone.configMap" -}}
{{ .Values.existingConfigMap | default (include "lodestone.ownConfigMap" .) }}
{{- end }}

{{- define "lodestone.ownMembershipSecret" -}}
lodestone-membership
{{- end }}

{{- define "lodestone.membershipSecret" -}}
{{ .Values.membership.existingSecret | default (include "lodestone.ownMembershipSecret" .) }}
{{- end }}

{{/* Names of the Secrets with passwords of BGP peers, as JSON: those listed, and those that the
configuration names. The controller reports what is wrong with the configuration. */}}
{{- define "lodestone.passwordSecrets" -}}
{{- $names := .Values.speaker.bgp.passwordSecrets }}
{{- $existing := .Values.existingConfigMap }}
{{- range (.Values.config | default dict).peers }}
{{- if and (kindIs "map" .passwordSecretRef) (kindIs "string" (get (.passwordSecretRef | default dict) "name")) }}
{{- if and $existing (not (has .passwordSecretRef.name $names)) }}
{{- fail (printf "existingConfigMap: it is not known here which Secrets ConfigMap %s names, and sessions whose password cannot be read end: list Secret %s in speaker.bgp.passwordSecrets, or take its peer out of config" $existing .passwordSecretRef.name) }}
{{- end }}
{{- $names = append $names .passwordSecretRef.name }}
{{- end }}
{{- end }}
{{- $names | uniq | sortAlpha | toJson }}
{{- end }}

{{/* Refuses an upgrade with an object that has the name of the chart's own and that somebody else is to keep. If the last revision
has it, Helm deletes it. The object does not show that: one that was deleted and made again has none of Helm's annotations. */}}
{{- define "lodestone.refuseOwn" -}}
{{- if and .root.Release.IsUpgrade (eq .name .own) }}
{{- $annotations := dig "metadata" "annotations" dict (lookup "v1" .kind .root.Release.Namespace .name) }}
{{- if ne (get $annotations "helm.sh/resource-policy") "keep" }}
{{- $cure := "name a copy, or annotate it with helm.sh/resource-policy=keep first" }}
{{- fail (printf "%s: %s %s has the name of the release's own, and the upgrade would delete that: %s" .value .kind .name $cure) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What both components may do to prove who asks for their metrics. */}}
{{- define "lodestone.delegatedAuthRules" -}}
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}

{{/* The ConfigMap, by name: a field selector on the name satisfies it for list and watch. */}}
{{- define "lodestone.configRule" -}}
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [{{ include "lodestone.configMap" . }}]
  verbs: [get, list, watch]
{{- end }}

{{/* How to read a component's metrics. The alerts know the labels job and node. The
certificates are self-signed; who asks proves it by a token. */}}
{{- define "lodestone.endpoint" -}}
port: https
scheme: https
interval: {{ .interval }}
tlsConfig: {insecureSkipVerify: true}
relabelings:
  - {targetLabel: job, replacement: lodestone-{{ .component }}}
  - {sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: node}
{{- end }}

{{/* Annotations of what exists for the time of a test; the argument is the order. A pod
that has failed stays: its log has the reason. */}}
{{- define "lodestone.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
