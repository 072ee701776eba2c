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
{{ .root.Values.image.registry }}/{{ .values.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "lodestone.configMap" -}}
{{ .Values.existingConfigMap | default "lodestone-config" }}
{{- end }}

{{- define "lodestone.membershipSecret" -}}
{{ .Values.membership.existingSecret | default "lodestone-membership" }}
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
