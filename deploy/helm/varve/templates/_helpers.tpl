{{- define "varve.selector" -}}
app.kubernetes.io/name: varve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "varve.metadata" -}}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "varve.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The port after the last colon of a listener, which is an address or a map with one. */ -}}
{{- define "varve.port" -}}
{{- $address := . -}}
{{- if kindIs "map" . }}{{- $address = .address -}}{{- end -}}
{{- regexFind "[0-9]+$" $address -}}
{{- end }}

{{- define "varve.kafkaPort" -}}
{{- include "varve.port" (first .Values.settings.listeners) -}}
{{- end }}

{{- define "varve.httpPort" -}}
{{- include "varve.port" .Values.settings.http -}}
{{- end }}
