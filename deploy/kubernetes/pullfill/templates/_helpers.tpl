{{/* Address of each server: `URL,URL`. */}}
{{- define "pullfill.nats" -}}
{{- if .Values.nats.enabled -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.nats.replicas) -}}
{{- $urls = append $urls (printf "nats://%s-nats-%d.%s-nats:4222" $.Release.Name $i $.Release.Name) -}}
{{- end -}}
{{- join "," $urls -}}
{{- else -}}
{{- required "natsUrl is needed with nats.enabled=false" .Values.natsUrl -}}
{{- end -}}
{{- end }}

{{- define "pullfill.etcd" -}}
{{- if .Values.etcd.enabled -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.etcd.replicas) -}}
{{- $urls = append $urls (printf "http://%s-etcd-%d.%s-etcd:2379" $.Release.Name $i $.Release.Name) -}}
{{- end -}}
{{- join "," $urls -}}
{{- else -}}
{{- required "etcdUrl is needed with etcd.enabled=false" .Values.etcdUrl -}}
{{- end -}}
{{- end }}

{{/* Labels that find the pods of one role. Takes (dict "root" $ "role" "decode"). */}}
{{- define "pullfill.labels" -}}
app.kubernetes.io/name: pullfill
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{/* How every process finds its cluster. */}}
{{- define "pullfill.cluster" -}}
- --etcd={{ include "pullfill.etcd" . }}
- --nats={{ include "pullfill.nats" . }}
- --namespace={{ .Values.pullfillNamespace }}
{{- if .Values.securitySecret }}
- --security=/etc/pullfill/security.toml
{{- end }}
{{- end }}

{{/* What frontends and workers tell of themselves. */}}
{{- define "pullfill.telemetry" -}}
- --log-format={{ .Values.logFormat }}
{{- with .Values.otlpTracesEndpoint }}
- --otlp-traces-endpoint={{ . }}
{{- end }}
{{- end }}

{{/* What a pod may do: the same for all. */}}
{{- define "pullfill.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "pullfill.container" -}}
image: {{ .Values.global.image }}
imagePullPolicy: {{ .Values.global.imagePullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
{{- end }}

{{/* Where the pods of a role may run. Takes its values. */}}
{{- define "pullfill.place" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Probes. The port opens when all is loaded. Takes how often the startup may be asked, each 5 s. */}}
{{- define "pullfill.probes" -}}
startupProbe:
  httpGet:
    path: /live
    port: http
  periodSeconds: 5
  failureThreshold: {{ . }}
livenessProbe:
  httpGet:
    path: /live
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet:
    path: /ready
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* The model cache, and the keys. Takes (dict "root" $ "values" role's). */}}
{{- define "pullfill.mounts" -}}
- name: cache
  mountPath: /home/pullfill/.cache
{{- if .root.Values.securitySecret }}
- name: security
  mountPath: /etc/pullfill
  readOnly: true
{{- end }}
{{- end }}

{{- define "pullfill.volumes" -}}
- name: cache
  {{- if .values.cacheClaim }}
  persistentVolumeClaim:
    claimName: {{ .values.cacheClaim }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- if .root.Values.securitySecret }}
- name: security
  secret:
    secretName: {{ .root.Values.securitySecret }}
    # pullfill refuses keys that others may read.
    defaultMode: 0440
{{- end }}
{{- end }}
