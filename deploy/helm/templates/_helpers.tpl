{{- define "kvrag.name" -}}
{{- $name := ternary .Release.Name (printf "%s-kvrag" .Release.Name) (contains "kvrag" .Release.Name) -}}
{{- trunc 40 $name | trimSuffix "-" -}}
{{- end }}

{{- /* Labels of a part: (list . "server"). Selectors have the same ones. */ -}}
{{- define "kvrag.labels" -}}
app.kubernetes.io/name: kvrag
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* Memory and disk before the store of the index, or the one that is named. */ -}}
{{- define "kvrag.store" -}}
{{- $parts := splitn "?" 2 .Values.index -}}
{{- $own := printf "%s/kv" (trimSuffix "/" $parts._0) -}}
{{- with $parts._1 }}{{ $own = printf "%s?%s" $own . }}{{ end -}}
{{- with .Values.store -}}
tiered:memory:?limit={{ .memory }}|file:/data/kv?limit={{ .disk }}|{{ .url | default $own }}
{{- end }}
{{- end }}

{{- define "kvrag.pod" -}}
automountServiceAccountToken: false
# A Service called kvrag would set KVRAG_PORT and others, which are kvrag's own names.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Apart, if the cluster has the nodes: (list . "server"). */ -}}
{{- define "kvrag.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "kvrag.labels" . | nindent 8 }}
{{- end }}

{{- define "kvrag.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
