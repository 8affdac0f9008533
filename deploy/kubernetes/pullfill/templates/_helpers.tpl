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

{{/* `--namespace`, and the label of all series. Two releases differ: no name there has a `_`. */}}
{{- define "pullfill.namespace" -}}
{{- $name := .Values.pullfillNamespace | default (printf "%s_%s" .Release.Namespace .Release.Name) -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "%s has more than 63 characters: set pullfillNamespace to a name of its own" $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/* Labels that find the pods of one role. Takes (dict "root" $ "role" "decode"). */}}
{{- define "pullfill.labels" -}}
app.kubernetes.io/name: pullfill
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{/* Whether KEDA scales a role: "true" or nothing. Takes (dict "root" $ "role" "decode"). Workers with
both sides do what others leave. So beside them KEDA scales no others: each would follow the other. */}}
{{- define "pullfill.scaled" -}}
{{- $chosen := or (eq .role "worker") (eq 0 (int .root.Values.worker.replicas)) -}}
{{- if and .root.Values.keda.enabled $chosen (gt (int (index .root.Values .role).replicas) 0) -}}
true
{{- end -}}
{{- end }}

{{/* How every process finds its cluster. */}}
{{- define "pullfill.cluster" -}}
- --etcd={{ include "pullfill.etcd" . }}
- --nats={{ include "pullfill.nats" . }}
- --namespace={{ include "pullfill.namespace" . }}
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

{{/* Takes (dict "root" $ "values" role's, or none). */}}
{{- define "pullfill.container" -}}
image: {{ .root.Values.global.image }}
imagePullPolicy: {{ .root.Values.global.imagePullPolicy }}
securityContext:
  {{- $own := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) }}
  {{- $given := dig "securityContext" dict (.values | default dict) }}
  {{- mergeOverwrite $own (deepCopy $given) | toYaml | nindent 2 }}
{{- end }}

{{/* How a Deployment replaces its pods. Takes (dict "values" role's "grace" seconds). */}}
{{- define "pullfill.rollout" -}}
# The old pod leaves, the image is pulled (10 minutes, as Kubernetes assumes), the start-up probe.
progressDeadlineSeconds: {{ add .grace 600 .values.startupSeconds }}
strategy:
{{- if .values.strategy }}
  {{- toYaml .values.strategy | nindent 2 }}
{{- else if contains "/" (join " " (keys (.values.resources.limits | default dict))) }}
  # All devices, such as nvidia.com/gpu, may be taken: a pod more would wait for one for ever.
  rollingUpdate:
    maxSurge: 0
    maxUnavailable: 1
{{- else }}
  rollingUpdate:
    maxSurge: 1
    maxUnavailable: 0
{{- end }}
{{- end }}

{{/* Where the pods of a role may run. Takes its values. */}}
{{- define "pullfill.place" -}}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
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

{{/* Probes. The port opens when all is loaded. Takes how long a start may take, in seconds. */}}
{{- define "pullfill.probes" -}}
startupProbe:
  httpGet:
    path: /live
    port: http
  periodSeconds: 5
  failureThreshold: {{ div (add . 4) 5 }}
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
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
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
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
